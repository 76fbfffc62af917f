"""Figures as PNG and PDF: the panels of a comparison, the figure of a partition.

`looks` assigns colours and markers; the same numbers give the same file.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpa.experiments.report.comparison import Comparison
from fedpa.experiments.report.curves import WINDOW, Panel, Series
from fedpa.experiments.report.looks import (
    COLOURS,
    MARKERS,
    STYLES,
    Look,
    assign_looks,
    style_line,
)

MARKS = 8
"""Markers along a line."""
KINDS: tuple[Literal["png", "pdf"], ...] = ("png", "pdf")
FIGURES = tuple(f"{name}.{kind}" for name in ("curves", "diagnostics", "clients") for kind in KINDS)
"""Possible files; a figure without numbers is left out."""
NAMED = 30
"""In a partition's figure, up to this many clients or labels are named."""
NUMBERED = 16
"""Up to this many clients and labels every cell shows its number."""
SHADES = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#9ecbe6", "#0072B2", "#001d33"])


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, in inches, with automatic layout."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Set title and labels with units, and remove the frame above and to the right."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def render_figure(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
    """Render a file's bytes, the same for the same figure: no date, no version."""
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}
    buffer = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # text stays text
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata[kind])
    return buffer.getvalue()


def draw_curves(comparisons: Sequence[Comparison]) -> Figure:
    """Draw learning curves as in the paper: a mark per evaluation, a line for their average."""
    panels = [
        part.curves._replace(
            title=part.title, y=f"{part.curves.y} (×), {WINDOW}-round average (line)"
        )
        for part in comparisons
    ]
    return _draw_panels(panels, comparisons, height=4.3, columns=1)


def draw_figures(comparisons: Sequence[Comparison]) -> dict[str, bytes]:
    """Draw all figures of comparisons: file name → content."""
    figures = {"curves": draw_curves(comparisons)}
    for name, height in (("diagnostics", 2.6), ("clients", 4.3)):
        panels = [
            panel if len(comparisons) == 1 else panel._replace(title=f"{part.task}: {panel.title}")
            for part in comparisons
            for panel in getattr(part, name)
        ]
        if panels:
            figures[name] = _draw_panels(panels, comparisons, height, columns=min(2, len(panels)))
    return {
        f"{name}.{kind}": render_figure(figure, kind)
        for name, figure in figures.items()
        for kind in KINDS
    }


def _draw_panels(
    panels: Sequence[Panel], comparisons: Sequence[Comparison], height: float, columns: int
) -> Figure:
    """Draw panels next to each other, each of this height in inches, and one legend below them.

    The legend is outside, because curves fill the panels.
    """
    looks = assign_looks([group for part in comparisons for group in part.groups])
    methods = list(looks)
    # As many columns as the longest label leaves room for: about a hundred characters.
    legend_columns = min(max(95 // (max(map(len, methods)) + 9), 1), 3)
    rows, legend_rows = math.ceil(len(panels) / columns), math.ceil(len(methods) / legend_columns)
    figure = new_figure(7.0, height * rows + 0.2 * legend_rows)
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    lines = {}
    for axes, panel in zip(grid, panels, strict=False):
        for series in panel.series:
            lines[series.method] = _draw_series(axes, series, looks[series.method])
        _draw_surroundings(axes, panel)
        _draw_end(axes, panel, looks)
    if lines:
        figure.legend(
            list(lines.values()),
            list(lines),
            loc="outside lower center",
            ncols=legend_columns,
            frameon=False,
            fontsize=8,
            handlelength=3.5,
        )
    return figure


def _draw_surroundings(axes: Axes, panel: Panel) -> None:
    """Draw a panel without its series."""
    for target in panel.targets:
        axes.axhline(target, color="0.85", linewidth=0.8, zorder=0)
    for switch in panel.switches:
        axes.axvline(switch, color="0.5", linestyle=(0, (1, 2)), linewidth=1.0)
    if panel.switches:
        axes.annotate(
            "sampling begins",
            (panel.switches[0], 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color="0.35",
        )
    tidy(axes, panel.title, "round", panel.y)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def _draw_end(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    """Draw the averages once more, larger, from the start of sampling, after a long burn-in.

    The burn-in is long if it is more than half of the rounds. The inset is where curves leave
    space: below those that rise, above those that fall.
    """
    drawn = [own for own in panel.series if len(own.line.rounds)]
    last = max((own.line.rounds[-1] for own in drawn), default=0)
    if len(panel.switches) != 1 or not last / 2 < panel.switches[0] < last:
        return
    (start,) = panel.switches
    rises = drawn[0].line.values[-1] > drawn[0].line.values[0]
    inset = axes.inset_axes((0.33, 0.16 if rises else 0.4, 0.62, 0.5))
    for series in drawn:
        rounds, values = (np.asarray(own) for own in series.line)
        inset.plot(
            rounds[rounds >= start],
            values[rounds >= start],
            color=COLOURS[looks[series.method].colour],
            linestyle=STYLES[looks[series.method].dash],
            linewidth=1.4,
        )
    tidy(inset, "averages from the start of sampling", "", "")
    inset.title.set_fontsize(8)
    inset.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def _draw_series(axes: Axes, series: Series, look: Look) -> Any:
    """Draw one method's curves; its line is the legend's."""
    colour = COLOURS[look.colour]
    for _, marks in series.marks:
        axes.plot(*marks, "x", color=colour, markersize=2.5, alpha=0.25)
    if series.band is not None:
        (rounds, low), (_, high) = series.band
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
    for _, rest in series.rest:
        axes.plot(*rest, color=colour, linewidth=0.6)
    # Markers are shifted, so that those of overlapping lines stay visible.
    every = max(len(series.line.rounds) // MARKS, 1)
    (line,) = axes.plot(
        *series.line,
        **style_line(look),
        linewidth=1.6,
        markersize=4.5,
        markevery=(look.marker * every // len(MARKERS), every),
    )
    return line


def draw_partition(
    counts: np.ndarray,
    clients: Sequence[str],
    labels: Sequence[str] | None,
    title: str,
    groups: Sequence[str] | None = None,
) -> Figure:
    """Draw the clients' sizes, and below them the share each label has of a client's examples.

    Clients are sorted by their most frequent label, so that skew shows as a diagonal.

    Args:
        counts: Examples, [clients, labels].
        clients: Their names.
        labels: Their names; None without labels: only sizes are drawn.
        title: The figure's title.
        groups: Each label's group, with equal groups next to each other; groups are named instead.
    """
    sizes = counts.sum(axis=1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    spread = int(sizes.max() - sizes.min())
    if labels is None:
        order, by, heights = np.argsort(-sizes, kind="stable"), "by size", [3.0]
    else:
        order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
        by = "sorted by most frequent label"
        heights = [5.2 if len(labels) > NAMED else 0.9 + max(1.2, 0.28 * len(labels))]
        if spread > 1:
            heights.insert(0, 1.0)
        else:  # no variation: stated in words
            title += f", {'about ' if spread else ''}{sizes.max():,} examples each"
    width = 8.0 if len(clients) > NAMED else max(4.5, 2.0 + 0.42 * len(clients))
    figure = new_figure(width, sum(heights))
    rows = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights).ravel()
    if labels is None or spread > 1:
        _draw_sizes(rows[0], sizes[order])
    if labels is not None:
        _draw_shares(figure, rows[-1], shares[order].T, counts[order].T)
        _name_labels(rows[-1], labels, groups)
    rows[0].set_title(title, fontsize=9, loc="left")
    _name_clients(rows[-1], [clients[i] for i in order], by)
    return figure


def _draw_sizes(axes: Axes, sizes: np.ndarray) -> None:
    tidy(axes, "", "", "examples")
    edges = np.arange(len(sizes) + 1) - 0.5
    axes.stairs(sizes, edges, fill=True, color=COLOURS[0], alpha=0.85)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(1, sizes.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.tick_params(axis="x", bottom=False)


def _draw_shares(figure: Figure, axes: Axes, shares: np.ndarray, counts: np.ndarray) -> None:
    """Draw shades by the square root of the share, so that small shares differ from none."""
    image = axes.imshow(
        shares,
        aspect="auto",
        cmap=SHADES,
        norm=PowerNorm(0.5, 0.0, max(float(shares.max()), 1e-9)),
        interpolation="nearest" if shares.shape[1] <= 600 else "antialiased",
    )
    axes.tick_params(labelsize=8)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.04, aspect=30)
    bar.set_label("share of a client's examples", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    if max(shares.shape) <= NUMBERED:
        for label, client in np.argwhere(counts > 0):
            dark = shares[label, client] > 0.25 * shares.max()
            axes.text(
                client,
                label,
                str(counts[label, client]),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
            )


def _name_labels(axes: Axes, labels: Sequence[str], groups: Sequence[str] | None) -> None:
    if groups is not None and len(labels) > NAMED:
        names, first = np.unique(np.array(groups), return_index=True)
        begins = np.sort(first)
        ends = np.append(begins[1:], len(groups))
        if len(names) <= NAMED:
            axes.set_yticks((begins + ends - 1) / 2, [_short(groups[i], 30) for i in begins])
            axes.tick_params(axis="y", labelsize=7, length=0)
            axes.set_yticks(begins - 0.5, minor=True)
            axes.tick_params(axis="y", which="minor", length=4)
            axes.set_ylabel(f"{len(labels)} labels in {len(names)} groups", fontsize=9)
            return
    axes.set_ylabel("label", fontsize=9)
    if len(labels) <= NAMED:
        axes.set_yticks(range(len(labels)), [_short(name, 30) for name in labels])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.yaxis.set_major_formatter(
            lambda at, _: _short(labels[int(at)], 16) if 0 <= at < len(labels) else ""
        )


def _name_clients(axes: Axes, names: Sequence[str], order: str) -> None:
    if len(names) > NAMED:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel(f"{len(names):,} clients, {order}", fontsize=9)
        return
    slanted = max(map(len, names)) > 4
    axes.set_xticks(
        range(len(names)),
        [_short(name, 16) for name in names],
        rotation=45 if slanted else 0,
        ha="right" if slanted else "center",
    )
    axes.set_xlabel("client", fontsize=9)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
