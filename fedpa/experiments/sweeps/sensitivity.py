"""What each hyperparameter does: the values of the trials at each of its choices, the others' any.

A mean over the trials that share a choice says how forgiving it is, the best of them what can be
had with it. Under random search and TPE the others are not the same at each choice; then the best
says more than the mean.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.table import Table

from fedpa.experiments.report.figures import COLOURS, new_figure, tidy
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


class Level(NamedTuple):
    """The trials that share a choice, or a part of an interval."""

    label: str
    place: float
    """On the axis of the figure; of a part of an interval, where its best trial is."""
    values: tuple[float, ...]
    is_best: bool
    """Whether the best of all trials is among them."""


class Marginal(NamedTuple):
    name: str
    levels: tuple[Level, ...]
    log: bool
    numeric: bool
    """Whether places are the values themselves, or their number in the list of choices."""
    ends: tuple[float, float] | None = None
    """Of an interval."""


def marginals(space: Space, trials: Sequence[Trial]) -> list[Marginal]:
    """For each hyperparameter its levels, with the values of the finished trials there."""
    return [
        _of_interval(name, values, trials)
        if isinstance(values, Interval)
        else _of_choices(name, values, trials)
        for name, values in _listed(space).items()
    ]


def _listed(space: Space) -> Space:
    """Intervals of a few whole numbers are looked at number by number."""
    return {
        name: tuple(range(int(values.low), int(values.high) + 1))
        if isinstance(values, Interval)
        and is_whole(name)
        and values.high - values.low < MOST_LABELS
        else values
        for name, values in space.items()
    }


def _of_choices(name: str, choices: Choices, trials: Sequence[Trial]) -> Marginal:
    numeric = all(isinstance(c, int | float) and not isinstance(c, bool) for c in choices)
    ordered = sorted(choices) if numeric else list(choices)
    places = ordered if numeric else range(len(ordered))
    top = find_best(trials)
    levels = tuple(
        Level(
            format_value(choice),
            float(place),
            _values(trials, name, (choice,).__contains__),
            top is not None and top.params[name] == choice,
        )
        for choice, place in zip(ordered, places, strict=True)
    )
    return Marginal(name, levels, numeric and _is_spread(ordered), numeric)


def _is_spread(ordered: Sequence[float | int]) -> bool:
    return ordered[0] > 0 and ordered[-1] / ordered[0] >= SPREAD


def _of_interval(name: str, values: Interval, trials: Sequence[Trial]) -> Marginal:
    low, high, log = values
    edges = np.geomspace(low, high, PARTS + 1) if log else np.linspace(low, high, PARTS + 1)
    parts = list(itertools.pairwise(edges.tolist()))
    levels = []
    for a, b in parts:
        last = (a, b) == parts[-1]  # to which its upper end belongs, too

        def inside(value: float, a: float = a, b: float = b, last: bool = last) -> bool:
            return a <= value and (value < b or last)

        there = [trial for trial in trials if inside(trial.params[name])]
        top = find_best(there)
        place = float(top.params[name]) if top is not None else a
        found = _values(there, name, inside)
        is_best = top is not None and top == find_best(trials)
        levels.append(Level(f"{format_value(a)} – {format_value(b)}", place, found, is_best))
    return Marginal(name, tuple(levels), log, True, (float(low), float(high)))


def _values(trials: Sequence[Trial], name: str, wanted: Callable[[Any], bool]) -> tuple[float, ...]:
    return tuple(t.value for t in trials if t.value is not None and wanted(t.params[name]))


def sensitivity_table(space: Space, trials: Sequence[Trial], metric: str) -> Table:
    """Mean and best at each choice, printed."""
    view = Table(
        title=f"{metric} by hyperparameter",
        title_justify="left",
        caption="over the finished trials with this value, whatever the others were; * the best",
        caption_justify="left",
    )
    view.add_column("hyperparameter", no_wrap=True)
    view.add_column("value", justify="right", no_wrap=True)
    for column in ("trials", "mean", "best"):
        view.add_column(column, justify="right")
    for marginal in marginals(space, trials):
        view.add_section()
        for n, level in enumerate(marginal.levels):
            mean, high = "–", "–"
            if level.values:
                mean, high = f"{np.mean(level.values):.4f}", f"{max(level.values):.4f}"
            mark = " *" if level.is_best else ""
            view.add_row(
                marginal.name if n == 0 else "",
                level.label,
                str(len(level.values)),
                mean,
                high + mark,
            )
    return view


def draw_sensitivity(space: Space, trials: Sequence[Trial], metric: str, title: str) -> Figure:
    """A panel for each hyperparameter: a point per trial, a line through the best at each value."""
    found = marginals(space, trials)
    across = 2 if len(found) == 4 else min(len(found), ACROSS)
    down = math.ceil(len(found) / across)
    figure = new_figure(0.6 + 2.9 * across, 0.5 + 2.5 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False).ravel()
    top = find_best(trials)
    for n, (axes, marginal) in enumerate(zip(panels, found, strict=False)):
        _panel(axes, marginal, trials, top)
        tidy(axes, "", marginal.name.replace("_", " "), metric if n % across == 0 else "")
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    return figure


def _panel(axes: Axes, marginal: Marginal, trials: Sequence[Trial], top: Trial | None) -> None:
    there = {level.label: level.place for level in marginal.levels}

    def place(trial: Trial) -> float:
        value = trial.params[marginal.name]
        return float(value) if marginal.numeric else there[format_value(value)]

    ended = [trial for trial in trials if trial.value is not None]
    lines = [level for level in marginal.levels if level.values]
    axes.plot(
        [level.place for level in lines],
        [max(level.values) for level in lines],
        color=COLOURS[0],
        linewidth=1.6,
        label="best at each value",
        zorder=2,
    )
    axes.plot(
        [place(trial) for trial in ended],
        [trial.value for trial in ended if trial.value is not None],
        "o",
        color=COLOURS[0],
        markersize=4,
        alpha=0.4,
        markeredgewidth=0,
        label="trial",
        zorder=3,
    )
    if top is not None and top.value is not None:
        axes.plot(
            [place(top)],
            [top.value],
            "*",
            color=COLOURS[1],
            markersize=11,
            markeredgecolor="white",
            label="best trial",
            zorder=4,
        )
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
