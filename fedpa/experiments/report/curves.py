"""Curves: a run's numbers by round, and the panels of a report.

As in the paper, "final" is the mean of the evaluations in the last rounds, and "rounds to x" the
first round at which the 10-round running average reaches x. Before round 10 the average is over the
rounds so far.

A panel's line is the mean over seeds at the rounds that all of them have, and a band spans the
lowest to the highest seed. Further rounds of single seeds are thin lines.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpa.algorithms.fedopt import SAMPLING, stage
from fedpa.experiments.report.runs import OWN, Group
from fedpa.metrics.streaming import PERCENTILES

Records = Sequence[Mapping[str, Any]]
WINDOW = 10
"""Rounds of the running average."""
DIAGNOSTICS = {
    "rho": ("Shrinkage", "ρ", "ρ in use; 0 in burn-in."),
    "delta_norm": ("Norm of the deltas", "‖Δ‖", "Mean over a round's clients."),
    "correction_norm": (
        "Norm of the correction",
        "‖correction‖",
        "Distance between a delta and FedAvg's from the same chain.",
    ),
    "correction_cosine": (
        "Direction of the correction",
        "cosine",
        "Cosine between a delta and FedAvg's from the same chain.",
    ),
    "ess": (
        "Effective sample size",
        "samples",
        "Number of independent samples with the same information; 0 in burn-in.",
    ),
    "precision_ratio": (
        "Gain of the precision",
        "‖D‖/‖Δ̄‖",
        "Length of D relative to the mean delta.",
    ),
    "precision_cosine": (
        "Direction of the precision",
        "cosine",
        "Cosine between D and the mean delta.",
    ),
    "precision_steepest": (
        "Steepest direction",
        "eigenvalue",
        "Largest eigenvalue of any layer's precision, in units of its inputs' mean square.",
    ),
    "rejected": (
        "Rejected clients",
        "clients so far",
        "Clients that failed or whose results were not finite.",
    ),
}
"""train/… → title, axis and note, in the order of the charts."""
NOT_PRIVATE = " Not noised, so not private."
"""Added to the note of a training metric of private runs."""
NO_DIAGNOSTICS = ("loss", "empty", "skipped", "rejected_clients")


class Curve(NamedTuple):
    rounds: np.ndarray
    values: np.ndarray

    def select(self, points: Any) -> "Curve":
        """Select points by a mask, a slice or indices."""
        return Curve(self.rounds[points], self.values[points])


class Series(NamedTuple):
    """One method's part of a panel."""

    method: str
    line: Curve
    band: tuple[Curve, Curve] | None = None
    """Low and high; None without a band, as with one seed."""
    rest: Sequence[tuple[str, Curve]] = ()
    """Seeds with rounds after the last round that all have."""
    marks: Sequence[tuple[str, Curve]] = ()
    """Evaluations, by seed."""


class Panel(NamedTuple):
    name: str
    title: str
    y: str
    note: str
    series: Sequence[Series]
    targets: tuple[float, ...] = ()
    switches: tuple[int, ...] = ()
    """Rounds in which sampling starts."""


class Scale(NamedTuple):
    """How numbers are reported."""

    metric: str
    targets: tuple[float, ...]
    last: int
    """Rounds whose evaluations make the final value."""
    lower: bool = False
    """Whether targets are reached from above."""


def read_curve(history: Records, key: str) -> Curve:
    """Read the rounds that have a value of `key`, and the values; NaN if one is not a number."""
    points = [(record["round"], record[key]) for record in history if key in record]
    rounds, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.array(rounds, int), np.array(values, float))


def read_last(history: Records, key: str) -> float:
    """Read the last record's value of `key`; NaN if it has none."""
    return float(history[-1].get(key, np.nan)) if history else np.nan


def align_curves(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Find the rounds that all curves have, and their values there: [rounds], [curves, rounds]."""
    rounds = functools.reduce(np.intersect1d, [curve.rounds for curve in curves])
    return rounds, np.array([curve.values[np.isin(curve.rounds, rounds)] for curve in curves])


def compute_finals(curves: Sequence[Curve], last: int) -> list[float]:
    """Average each curve over its `last` last rounds, up to the last round that all of them have.

    NaN where they have no round in common.
    """
    rounds, values = align_curves(curves)
    if not len(rounds):
        return [np.nan] * len(curves)
    recent = rounds > rounds[-1] - last
    return [float(np.mean(own[recent])) for own in values]


def compute_running_average(curve: Curve, window: int = WINDOW) -> Curve:
    """Average, at each round, the evaluations in the last `window` rounds, or in all so far."""
    means = [
        np.mean(curve.values[(curve.rounds > t - window) & (curve.rounds <= t)])
        for t in curve.rounds
    ]
    return Curve(curve.rounds, np.array(means, float))


def find_rounds_to(curve: Curve, target: float, lower: bool = False) -> int | None:
    """Find the first round at which the running average reaches `target`; None if it never does.

    lower: from above.
    """
    smooth = compute_running_average(curve)
    reached = smooth.rounds[smooth.values <= target if lower else smooth.values >= target]
    return int(reached[0]) if len(reached) else None


def find_first_sampling(history: Records) -> int | None:
    """Find the first round of the sampling phase."""
    sampling = (record["round"] for record in history if stage(record["phase"]) == SAMPLING)
    return next(sampling, None)


def find_split(groups: Sequence[Group], metric: str) -> str:
    """Find the split of the curves: `validation` or `test`.

    Empty if it is not known, as for metrics of a user's function.
    """
    history = next((history for group in groups for history in group.histories if history), ())
    evaluated = [record for record in history if f"eval/{metric}" in record]
    same = [record.get(f"valid/{metric}") == record[f"eval/{metric}"] for record in evaluated]
    if same and all(same):
        return "validation"
    return "test" if has_test(groups, metric) else ""


def has_test(groups: Sequence[Group], metric: str) -> bool:
    """Whether there is a test split: tasks have one, runs of `fedpa.fit` may."""
    histories = [history for group in groups for history in group.histories]
    ends = any(f"test/{metric}" in history[-1] for history in histories if history)
    return ends or groups[0].task != OWN


def make_learning_curves(groups: Sequence[Group], scale: Scale) -> Panel:
    """Make the paper's figure: a mark per evaluation, a line for the running average."""
    series = []
    for group in groups:
        marks = _read_curves(group, f"eval/{scale.metric}")
        smooth = [(s, compute_running_average(curve)) for s, curve in marks]
        series.append(_average_seeds(group.label, smooth)._replace(marks=marks))
    several = any(own.band is not None for own in series)
    band = ", shaded from the lowest seed to the highest" if several else ""
    note = f"×: an evaluation; line: the {WINDOW}-round average, mean over seeds{band}."
    if not any(_has_points(own) for own in series):
        note += " No run has been evaluated yet, so there is no line."
    starts = {find_first_sampling(history) for group in groups for history in group.histories}
    # A method that samples from the first round on has no burn-in.
    switches = tuple(sorted(t for t in starts if t is not None and t > 1))
    y = f"{find_split(groups, scale.metric)} {scale.metric}".strip()
    return Panel("curves", groups[0].task, y, note, series, scale.targets, switches)


def make_diagnostics(groups: Sequence[Group]) -> list[Panel]:
    """Make panels of the rounds' `train/…` numbers: known ones first, then those of samplers.

    Rejected clients have a panel only if there are any.
    """
    records = [record for group in groups for history in group.histories for record in history]
    available = dict.fromkeys(
        key.removeprefix("train/")
        for record in records
        for key, value in record.items()
        if key.startswith("train/") and isinstance(value, int | float)
    )
    if not any(record.get("train/rejected", 0) for record in records):
        available.pop("rejected", None)
    warning = NOT_PRIVATE if find_private(groups) else ""
    panels = []
    for name in sorted(available, key=[*DIAGNOSTICS, *available].index):
        if name not in NO_DIAGNOSTICS:
            plain = name.replace("_", " ")
            meaning = DIAGNOSTICS.get(name, (plain.capitalize(), plain, f"train/{name}."))
            series = [own for own in _make_series(groups, f"train/{name}") if _has_points(own)]
            title, y, note = meaning
            panels.append(Panel(f"train-{name}", title, y, note + warning, series))
    return panels


EPSILON, CLIP = "privacy/epsilon", "privacy/clip"


def make_privacy_panels(groups: Sequence[Group]) -> list[Panel]:
    """Make panels of ε and, if it changes, of the clipping norm; none without private runs."""
    spent = [own for own in _make_series(groups, EPSILON) if _has_points(own)]
    if not spent:
        return []
    note = "(ε, δ)-differential privacy at the level of clients, spent after each round."
    panels = [Panel("privacy-epsilon", "Privacy spent", "ε", note, spent)]
    clips = [own for own in _make_series(groups, CLIP) if len(set(own.line.values)) > 1]
    if clips:
        note = "The largest norm of what a client adds to the sum."
        panels.append(Panel("privacy-clip", "Clipping norm", "C", note, clips))
    return panels


def find_private(groups: Sequence[Group]) -> list[Group]:
    """Find the groups whose runs are private."""
    return [
        group
        for group in groups
        if any(EPSILON in record for history in group.histories for record in history)
    ]


def make_client_panels(groups: Sequence[Group]) -> list[Panel]:
    """Make panels of eval/<metric>_p10, _p50, _p90: the median as a line, the others as a band."""
    low, _, high = PERCENTILES
    panels = []
    for metric in find_spread_metrics(groups, "eval"):
        bounds = [_make_series(groups, f"eval/{metric}_p{p}") for p in PERCENTILES]
        series = [
            median._replace(band=(lower.line, upper.line))
            for lower, median, upper in zip(*bounds, strict=True)
            if _has_points(median)
        ]
        note = f"line: the median client; shaded: from {low} % of the clients to {high} %."
        panels.append(Panel(f"clients-{metric}", f"{metric} over clients", metric, note, series))
    return panels


def find_spread_metrics(groups: Sequence[Group], split: str) -> list[str]:
    """Find the metrics of a split that have percentiles over clients."""
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


def _make_series(groups: Sequence[Group], key: str) -> list[Series]:
    """Make a series of each method, which may be empty; rejected clients are accumulated."""
    series = []
    for group in groups:
        # Rounds without a number, as when no client counted, are left out.
        curves = [(s, c.select(np.isfinite(c.values))) for s, c in _read_curves(group, key)]
        if key == "train/rejected":
            curves = [(s, Curve(c.rounds, np.cumsum(c.values))) for s, c in curves]
        series.append(_average_seeds(group.label, curves))
    return series


def _read_curves(group: Group, key: str) -> list[tuple[str, Curve]]:
    return [(str(run.seed), read_curve(run.history, key)) for run in group.runs]


def _has_points(series: Series) -> bool:
    return bool(len(series.line.rounds) or series.rest)


def _average_seeds(method: str, seeds: Sequence[tuple[str, Curve]]) -> Series:
    """Average over seeds; if a seed has no round yet, there is no mean, only thin lines."""
    rounds, values = align_curves([curve for _, curve in seeds])
    band = None
    if len(seeds) > 1 and len(rounds):
        band = Curve(rounds, values.min(axis=0)), Curve(rounds, values.max(axis=0))
    last = rounds[-1] if len(rounds) else 0
    rest = [
        (seed, curve.select(curve.rounds >= last))
        for seed, curve in seeds
        if len(curve.rounds) and curve.rounds[-1] > last
    ]
    return Series(method, Curve(rounds, values.mean(axis=0)), band, rest)
