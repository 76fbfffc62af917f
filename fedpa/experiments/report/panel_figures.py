"""A report's panels as figures for papers: PNG and PDF, in the style of the learning curves."""

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedpa.experiments.report.figures import (
    legend_below,
    legend_height,
    line_of,
    new_figure,
    rendered,
    tidy,
)
from fedpa.experiments.report.panels import Panel, Series
from fedpa.experiments.report.parts import Part

KINDS: tuple[Literal["png", "pdf"], ...] = ("png", "pdf")
FIGURES = tuple(f"{name}.{kind}" for name in ("curves", "diagnostics", "clients") for kind in KINDS)
"""The files there may be; without numbers for it a figure is left out."""
COLUMNS = 2
WIDTH = 7.0


def figures(found: Sequence[Part]) -> dict[str, bytes]:
    """File name → content."""
    several = len(found) > 1
    panels = {
        "curves": [part.curves for part in found],
        "diagnostics": [_titled(p, part, several) for part in found for p in part.diagnostics],
        "clients": [_titled(p, part, several) for part in found for p in part.over_clients],
    }
    methods = list(dict.fromkeys(group.label for part in found for group in part.groups))
    drawn = {name: _figure(own, methods, name) for name, own in panels.items() if own}
    return {
        f"{name}.{kind}": rendered(figure, kind) for name, figure in drawn.items() for kind in KINDS
    }


def _titled(panel: Panel, part: Part, several: bool) -> Panel:
    return panel._replace(title=f"{part.task}: {panel.title}") if several else panel


def _figure(panels: Sequence[Panel], methods: Sequence[str], name: str) -> Figure:
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
