"""Figures: how they look, and the panels of a comparison drawn as PNG and PDF.

A palette and line styles that differ without colour, too; the same numbers give the same file.
"""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedpa.experiments.report.comparison import Comparison
from fedpa.experiments.report.panels import Panel, Series
from fedpa.experiments.report.summary import WINDOW

# Okabe and Ito's palette and a line style each: distinct without colour, too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLES: list[Any] = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
KINDS: tuple[Literal["png", "pdf"], ...] = ("png", "pdf")
FIGURES = tuple(f"{name}.{kind}" for name in ("curves", "diagnostics", "clients") for kind in KINDS)
"""The files there may be; without numbers for it a figure is left out."""
COLUMNS = 2
WIDTH = 7.0


def line_of(index: int) -> tuple[str, Any]:
    """(colour, style) of the method at this place; where colours repeat, styles differ."""
    style = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
    return COLOURS[index % len(COLOURS)], style


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that lays itself out."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels with their units, and no frame above and to the right."""
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def legend_height(labels: Sequence[str]) -> float:
    """Inches that `legend_below` needs."""
    return 0.2 * math.ceil(len(labels) / _columns(labels))


def legend_below(figure: Figure, handles: Mapping[str, Artist]) -> None:
    """A legend outside: curves fill a panel from corner to corner."""
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=_columns(list(handles)),
        frameon=False,
        fontsize=8,
    )


def _columns(labels: Sequence[str]) -> int:
    """As many as the longest label leaves room for: about a hundred characters to a figure."""
    longest = max(len(label) for label in labels)
    return min(max(95 // (longest + 9), 1), 3)


def render_figure(figure: Figure, kind: Literal["png", "pdf"]) -> bytes:
    """The figure as a file's bytes, the same for the same figure: no date, no version."""
    metadata = {"png": {"Software": None}, "pdf": {"CreationDate": None, "Producer": None}}
    buffer = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # text stays text
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata[kind])
    return buffer.getvalue()


def draw_curves(comparison: Comparison, title: str) -> Figure:
    """Draw learning curves as in the paper: a mark per evaluation, a line for their average."""
    methods = [group.label for group in comparison.groups]
    y = f"{comparison.curves.y} (×), {WINDOW}-round average (line)"
    return _draw_panels([comparison.curves._replace(title=title, y=y)], methods, "curves")


def draw_figures(found: Sequence[Comparison]) -> dict[str, bytes]:
    """Draw all that there is of comparisons: file name → content."""
    several = len(found) > 1
    panels = {
        "curves": [part.curves for part in found],
        "diagnostics": [_titled(p, part, several) for part in found for p in part.diagnostics],
        "clients": [_titled(p, part, several) for part in found for p in part.over_clients],
    }
    methods = list(dict.fromkeys(group.label for part in found for group in part.groups))
    drawn = {name: _draw_panels(own, methods, name) for name, own in panels.items() if own}
    return {
        f"{name}.{kind}": render_figure(figure, kind)
        for name, figure in drawn.items()
        for kind in KINDS
    }


def _titled(panel: Panel, part: Comparison, several: bool) -> Panel:
    return panel._replace(title=f"{part.task}: {panel.title}") if several else panel


def _draw_panels(panels: Sequence[Panel], methods: Sequence[str], name: str) -> Figure:
    columns = 1 if name == "curves" else min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    height = 4.3 if name != "diagnostics" else 2.6
    figure = new_figure(WIDTH, height * rows + legend_height(methods))
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        _draw(axes, panel, methods)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}
    for axes in grid:
        lines, labels = axes.get_legend_handles_labels()
        handles |= {label: line for line, label in zip(lines, labels, strict=True)}
    if handles:
        legend_below(figure, handles)  # one for all
    return figure


def _draw(axes: Axes, panel: Panel, methods: Sequence[str]) -> None:
    for target in panel.targets:
        axes.axhline(target, color="0.85", linewidth=0.8, zorder=0)
    for series in panel.series:
        _draw_series(axes, series, methods.index(series.method))
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


def _draw_series(axes: Axes, series: Series, index: int) -> None:
    colour, style = line_of(index)
    for marks in series.marks:
        axes.plot(*marks.points, "x", color=colour, markersize=2.5, alpha=0.25)
    if series.low is not None and series.high is not None:
        rounds, low = series.low
        axes.fill_between(rounds, low, series.high.values, color=colour, alpha=0.15, linewidth=0)
    for rest in series.rest:
        axes.plot(*rest.points, color=colour, linewidth=0.6)
    axes.plot(*series.line, color=colour, linestyle=style, linewidth=1.8, label=series.method)
