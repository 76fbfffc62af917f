"""Who has which labels: a picture of clients × labels, from ten clients to thousands."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedpa.experiments.report.figures import COLOURS, new_figure

NAMED = 30
"""Up to this many clients or labels each has its name beside it."""
NUMBERED = 16
"""Up to this many clients and labels every cell has its number in it."""
SHADES = LinearSegmentedColormap.from_list("shares", ["#ffffff", "#9ecbe6", "#0072B2", "#001d33"])


def draw_partition(
    counts: np.ndarray,
    clients: Sequence[str],
    labels: Sequence[str] | None,
    title: str,
    groups: Sequence[str] | None = None,
) -> Figure:
    """Sizes of the clients above, below them the share that each label has of a client's examples.

    counts: examples, [clients, labels]. labels: None where there are none: then sizes only.
    groups: of the labels, each one's, those of a group side by side: then groups are named instead.
    Clients stand in the order of the label they have most of, so that skew shows as a diagonal.
    """
    sizes = counts.sum(axis=1)
    width = 8.0 if len(clients) > NAMED else max(4.5, 2.0 + 0.42 * len(clients))
    if labels is None:
        order = np.argsort(-sizes, kind="stable")
        figure = new_figure(width, 3.0)
        axes = figure.subplots()
        _draw_sizes(axes, sizes[order])
        axes.set_title(title, fontsize=9, loc="left")
        _name_clients(axes, [clients[i] for i in order], "by size")
        return figure
    shares = counts / np.maximum(sizes, 1)[:, None]
    order = np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
    height = 5.2 if len(labels) > NAMED else 0.9 + max(1.2, 0.28 * len(labels))
    equal = int(sizes.max() - sizes.min()) <= 1
    if equal:  # nothing to see: a word says it
        figure = new_figure(width, height)
        upper = lower = figure.subplots()
        about = "" if sizes.max() == sizes.min() else "about "
        title += f", {about}{sizes.max():,} examples each"
    else:
        figure = new_figure(width, height + 1.0)
        upper, lower = figure.subplots(2, sharex=True, height_ratios=[1.0, height])
        _draw_sizes(upper, sizes[order])
    upper.set_title(title, fontsize=9, loc="left")
    _draw_shares(figure, lower, shares[order].T, counts[order].T)
    _name_labels(lower, labels, groups)
    _name_clients(lower, [clients[i] for i in order], "by the label they have most of")
    return figure


def _draw_sizes(axes: Axes, sizes: np.ndarray) -> None:
    edges = np.arange(len(sizes) + 1) - 0.5
    axes.stairs(sizes, edges, fill=True, color=COLOURS[0], alpha=0.85)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, max(1, sizes.max()) * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.set_ylabel("examples", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.tick_params(axis="x", bottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_shares(figure: Figure, axes: Axes, shares: np.ndarray, counts: np.ndarray) -> None:
    """Small shares are told from none: shades go by the root of the share."""
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
