"""What a report draws, as numbers: one panel per chart, for the page and for files alike.

A line is the mean over seeds at the rounds that all of them have; a band reaches from the lowest
seed to the highest there. Where some seeds have gone further, each goes on as a thin line.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpa.experiments.report.found_runs import Group, Scale
from fedpa.experiments.report.summary import (
    WINDOW,
    Curve,
    at_the_end,
    curve,
    mean_over_seeds,
    running_average,
    split_shown,
    switch_round,
)
from fedpa.metrics.streaming import PERCENTILES


class Meaning(NamedTuple):
    title: str
    y: str
    note: str


DIAGNOSTICS = {
    "rho": Meaning("Shrinkage", "ρ", "ρ in use; 0 in burn-in."),
    "delta_norm": Meaning("Norm of the deltas", "‖Δ‖", "Mean over a round's clients."),
    "correction_norm": Meaning(
        "Norm of the correction",
        "‖correction‖",
        "How far the posterior moves a delta from FedAvg's of the same chain.",
    ),
    "correction_cosine": Meaning(
        "Direction of the correction", "cosine", "Between a delta and FedAvg's of the same chain."
    ),
    "ess": Meaning(
        "Effective sample size",
        "samples",
        "Independent samples that a client's are worth; 0 in burn-in.",
    ),
    "precision_ratio": Meaning(
        "Gain of the precision", "‖D‖/‖Δ̄‖", "What is left of the mean delta's length."
    ),
    "precision_cosine": Meaning(
        "Direction of the precision", "cosine", "Between D and the mean delta."
    ),
    "precision_steepest": Meaning(
        "Steepest direction", "eigenvalue", "The largest of any layer's precision; the mean is 1."
    ),
    "rejected": Meaning("Rejected clients", "clients so far", "Whose results were not finite."),
}
"""What each train/… number means, in the order of the charts."""
NO_DIAGNOSTICS = ("loss", "empty", "skipped", "rejected_clients")


class Marks(NamedTuple):
    seed: str
    points: Curve


class Series(NamedTuple):
    """One method's part of a panel."""

    method: str
    line: Curve
    low: Curve | None
    """Of the band; None where there is none, as with one seed."""
    high: Curve | None
    rest: Sequence[Marks]
    """Seeds that went on after the last round they all have."""
    marks: Sequence[Marks]


class Panel(NamedTuple):
    name: str
    title: str
    note: str
    y: str
    series: Sequence[Series]
    targets: tuple[float, ...] = ()
    switches: tuple[int, ...] = ()
    """Rounds in which sampling begins."""


def learning_curves(groups: Sequence[Group], scale: Scale) -> Panel:
    """As in the paper: a mark per evaluation, a line for the running average."""
    series = []
    for group in groups:
        found = [curve(history, f"eval/{scale.metric}") for history in group.histories]
        marks = [Marks(str(run.seed), c) for run, c in zip(group.runs, found, strict=True)]
        smooth = [Marks(m.seed, running_average(m.points)) for m in marks]
        series.append(_over_seeds(group.label, smooth)._replace(marks=marks))
    evaluated = [h for group in groups for h in group.histories if h]
    split = split_shown(evaluated[0], scale.metric) if evaluated else "test"
    several = any(s.low is not None for s in series)
    band = ", shaded from the lowest seed to the highest" if several else ""
    note = f"×: an evaluation; line: the {WINDOW}-round average, mean over seeds{band}."
    if not any(len(s.line.rounds) or s.rest for s in series):
        note += f" No run has been evaluated after round {WINDOW} yet, so there is no line."
    switches = {switch_round(history) for group in groups for history in group.histories}
    return Panel(
        "curves",
        groups[0].task,
        note,
        f"{split} {scale.metric}",
        series,
        scale.targets,
        tuple(sorted(t for t in switches if t is not None)),
    )


def diagnostics(groups: Sequence[Group]) -> list[Panel]:
    """The rounds' `train/…` numbers, in a known order, and what samplers add to them.

    Rejected clients have a panel only if there are any.
    """
    records = [record for group in groups for history in group.histories for record in history]
    there = dict.fromkeys(
        key.removeprefix("train/")
        for record in records
        for key, value in record.items()
        if key.startswith("train/") and isinstance(value, int | float)
    )
    if not any(record.get("train/rejected", 0) for record in records):
        there.pop("rejected", None)
    named = [*(name for name in DIAGNOSTICS if name in there), *there]
    return [
        _diagnostic(groups, name) for name in dict.fromkeys(named) if name not in NO_DIAGNOSTICS
    ]


def _diagnostic(groups: Sequence[Group], name: str) -> Panel:
    plain = name.replace("_", " ")
    meaning = DIAGNOSTICS.get(name, Meaning(plain.capitalize(), plain, f"train/{name}."))
    series = [_of_key(group, f"train/{name}", added_up=name == "rejected") for group in groups]
    there = [s for s in series if len(s.line.rounds) or s.rest]
    return Panel(f"train-{name}", meaning.title, meaning.note, meaning.y, there)


def over_clients(groups: Sequence[Group]) -> list[Panel]:
    """eval/<metric>_p10, _p50, _p90 by round: the median as a line, the percentiles as a band."""
    panels = []
    low, middle, high = PERCENTILES
    for metric in spread_metrics(groups, "eval"):
        series = []
        for group in groups:
            bounds = {p: _of_key(group, f"eval/{metric}_p{p}") for p in PERCENTILES}
            if len(bounds[middle].line.rounds) or bounds[middle].rest:
                series.append(bounds[middle]._replace(low=bounds[low].line, high=bounds[high].line))
        note = f"line: the median client; shaded: from {low} % of the clients to {high} %."
        panels.append(Panel(f"clients-{metric}", f"{metric} over clients", note, metric, series))
    return panels


def spread_metrics(groups: Sequence[Group], split: str) -> list[str]:
    """The metrics of a split that are there as percentiles over clients."""
    end = f"_p{PERCENTILES[0]}"
    return list(
        dict.fromkeys(
            key.removeprefix(f"{split}/").removesuffix(end)
            for group in groups
            for history in group.histories
            for record in history
            for key in record
            if key.startswith(f"{split}/") and key.endswith(end)
        )
    )


def _of_key(group: Group, key: str, added_up: bool = False) -> Series:
    """added_up: over the rounds so far, for what happens now and then."""
    found = [Marks(str(r.seed), _finite(curve(r.history, key))) for r in group.runs]
    if added_up:
        sums = [Curve(m.points.rounds, np.cumsum(m.points.values)) for m in found]
        found = [m._replace(points=c) for m, c in zip(found, sums, strict=True)]
    return _over_seeds(group.label, found)


def _finite(c: Curve) -> Curve:
    """Rounds whose number is none, as when no client counted, are left out."""
    there = np.isfinite(c.values)
    return Curve(c.rounds[there], c.values[there])


def _over_seeds(method: str, seeds: Sequence[Marks]) -> Series:
    """A seed that has nothing yet leaves no round that all have: the others are thin lines."""
    curves = [seed.points for seed in seeds]
    line = mean_over_seeds(curves)
    low = high = None
    if len(curves) > 1 and len(line.rounds):
        values = np.array([c.values[np.isin(c.rounds, line.rounds)] for c in curves])
        low = Curve(line.rounds, values.min(axis=0))
        high = Curve(line.rounds, values.max(axis=0))
    return Series(method, line, low, high, _rests(seeds, line), ())


def _rests(seeds: Sequence[Marks], line: Curve) -> list[Marks]:
    """What each seed has after the last round that all have, joined to it."""
    last = line.rounds[-1] if len(line.rounds) else 0
    rests = []
    for seed in seeds:
        rounds, values = seed.points
        if len(rounds) and rounds[-1] > last:
            rests.append(Marks(seed.seed, Curve(rounds[rounds >= last], values[rounds >= last])))
    return rests


def at_the_end_over_clients(group: Group, metric: str) -> list[float]:
    """test/<metric>_p10, _p50, _p90 at the end, mean over seeds; NaN unless all have them."""
    return [
        float(np.mean([at_the_end(h, f"test/{metric}_p{p}") for h in group.histories]))
        for p in PERCENTILES
    ]
