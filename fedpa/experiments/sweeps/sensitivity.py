"""The effect of each hyperparameter: the values of the trials at each of its choices.

The mean over trials with the same choice shows how robust the choice is, the best of them what it
can reach. With random search and TPE the other settings differ between choices, so the best is more
informative than the mean.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.table import Table

from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import COLOURS, PLACES, choose_look
from fedpa.experiments.sweeps.search import Trial, find_best
from fedpa.experiments.sweeps.space import Choices, Interval, Space, format_value, is_whole

PICTURE = "sensitivity.png"
PARTS = 5
"""An interval is looked at in this many parts."""
SPREAD = 20.0
"""Numbers of which the largest is this many times the smallest are drawn on a logarithmic axis."""
ACROSS = 3
"""Panels in a row."""
MOST_LABELS = 7


class Point(NamedTuple):
    """A finished trial in a panel."""

    place: float
    value: float
    is_best: bool
    """Of all trials."""


class Level(NamedTuple):
    """The finished trials that share a choice, or a part of an interval."""

    label: str
    place: float
    """On the axis of the figure: the choice, or its number in the list if it is no number."""
    points: list[Point]

    @property
    def values(self) -> list[float]:
        return [point.value for point in self.points]


class Marginal(NamedTuple):
    name: str
    levels: list[Level]
    log: bool
    is_numeric: bool
    """Whether places are the values themselves."""
    ends: tuple[float, float] | None = None
    """Of an interval."""


def find_marginals(space: Space, trials: Sequence[Trial]) -> list[Marginal]:
    """For each hyperparameter its levels, with the finished trials there."""
    top, marginals = find_best(trials), []
    for name, values in space.items():
        if isinstance(values, Interval) and is_whole(name):
            low, high, _ = values
            if high - low < MOST_LABELS:  # a few whole numbers are looked at one by one
                values = tuple(range(int(low), int(high) + 1))
        marginal, level_of = _split(name, values)
        for trial in trials:
            if trial.value is not None:
                choice = trial.params[name]
                level = marginal.levels[level_of(choice)]
                place = float(choice) if marginal.is_numeric else level.place
                level.points.append(Point(place, trial.value, trial is top))
        marginals.append(marginal)
    return marginals


def _split(name: str, values: Choices | Interval) -> tuple[Marginal, Callable[[Any], int]]:
    """The levels of a hyperparameter, and which of them a value belongs to."""
    if isinstance(values, Interval):
        low, high, log = values
        edges = (np.geomspace if log else np.linspace)(low, high, PARTS + 1).tolist()
        levels = [
            Level(f"{format_value(a)} – {format_value(b)}", a, [])
            for a, b in itertools.pairwise(edges)
        ]
        marginal = Marginal(name, levels, log, True, (float(low), float(high)))
        return marginal, lambda value: bisect.bisect_right(edges[1:-1], value)
    is_numeric = all(isinstance(c, int | float) and not isinstance(c, bool) for c in values)
    choices = sorted(values) if is_numeric else list(values)
    places = choices if is_numeric else range(len(choices))
    levels = [Level(format_value(c), float(at), []) for c, at in zip(choices, places, strict=True)]
    log = is_numeric and choices[0] > 0 and choices[-1] / choices[0] >= SPREAD
    return Marginal(name, levels, log, is_numeric), choices.index


def sensitivity_table(space: Space, trials: Sequence[Trial], metric: str) -> Table:
    """Mean and best at each choice, printed."""
    view = Table(
        title=f"{metric} by hyperparameter",
        title_justify="left",
        caption="over all finished trials with this value; * the best",
        caption_justify="left",
    )
    view.add_column("hyperparameter", no_wrap=True)
    view.add_column("value", justify="right", no_wrap=True)
    for column in ("trials", "mean", "best"):
        view.add_column(column, justify="right")
    for marginal in find_marginals(space, trials):
        view.add_section()
        name = marginal.name
        for level in marginal.levels:
            mean, best = "–", "–"
            if level.points:
                mean, best = f"{np.mean(level.values):.4f}", f"{max(level.values):.4f}"
            mark = " *" if any(point.is_best for point in level.points) else ""
            view.add_row(name, level.label, str(len(level.points)), mean, best + mark)
            name = ""
    return view


def draw_sensitivity(
    space: Space, trials: Sequence[Trial], metric: str, method: str, title: str
) -> Figure:
    """A panel for each hyperparameter: a point per trial, a line through the best at each value."""
    colour = COLOURS[choose_look(PLACES[method]).colour]
    marginals = find_marginals(space, trials)
    across = 2 if len(marginals) == 4 else min(len(marginals), ACROSS)
    down = math.ceil(len(marginals) / across)
    figure = new_figure(0.6 + 2.9 * across, 0.5 + 2.5 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    for n, (axes, marginal) in enumerate(zip(panels, marginals, strict=False)):
        _draw_panel(axes, marginal, colour)
        tidy(axes, "", marginal.name.replace("_", " "), metric if n % across == 0 else "")
    for axes in panels[len(marginals) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_panel(axes: Axes, marginal: Marginal, colour: str) -> None:
    def plot(points: Sequence[Point], label: str, **look: Any) -> None:
        x, y = [point.place for point in points], [point.value for point in points]
        axes.plot(x, y, label=label, **look)

    levels = [level.points for level in marginal.levels if level.points]
    points = [point for level in levels for point in level]
    best = [max(level, key=lambda point: point.value) for level in levels]
    plot(best, "best at each value", color=colour, linewidth=1.6, zorder=2)
    faint = {"marker": "o", "markersize": 4, "markeredgewidth": 0, "alpha": 0.4}
    plot(points, "trial", color=colour, linestyle="none", zorder=3, **faint)
    star = {"marker": "*", "markersize": 11, "markeredgecolor": "white"}
    top = [point for point in points if point.is_best]
    plot(top, "best trial", color="black", linestyle="none", zorder=4, **star)
    if marginal.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.08)
    if marginal.ends is not None:
        axes.set_xlim(*marginal.ends)
    elif len(marginal.levels) <= MOST_LABELS:
        places = [level.place for level in marginal.levels]
        axes.set_xticks(places, [level.label for level in marginal.levels])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
