"""A run's numbers as the paper reports them.

"Final" is the mean of the evaluations in the last rounds; "rounds to x" is the first round at which
the 10-round running average reaches x.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpa.algorithms.fedopt import stage

WINDOW = 10


class Curve(NamedTuple):
    rounds: np.ndarray
    values: np.ndarray


def curve(history: Sequence[Mapping[str, Any]], key: str) -> Curve:
    """The evaluated rounds and their values of `key`; a value that was no number is NaN."""
    points = [(r["round"], r[key]) for r in history if key in r]
    rounds = np.array([t for t, _ in points], int)
    values = np.array([np.nan if v is None else v for _, v in points], float)
    return Curve(rounds, values)


def final(c: Curve, last: int) -> float:
    """The mean of the evaluations in the `last` last rounds."""
    return float(np.mean(c.values[c.rounds > c.rounds[-1] - last])) if len(c.rounds) else np.nan


def finals(curves: Sequence[Curve], last: int) -> list[float]:
    """The same of each, over the same evaluations: up to the last round that all of them have."""
    common = common_rounds(curves)
    if not len(common):
        return [np.nan] * len(curves)
    rounds = common[common > common[-1] - last]
    return [float(np.mean(c.values[np.isin(c.rounds, rounds)])) for c in curves]


def common_rounds(curves: Sequence[Curve]) -> np.ndarray:
    """The rounds that all of them evaluated: a run may have ended before the others."""
    return functools.reduce(np.intersect1d, [c.rounds for c in curves])


def at_the_end(history: Sequence[Mapping[str, Any]], key: str) -> float:
    """The last record's value of `key`; NaN if it has none."""
    value = history[-1].get(key) if history else None
    return np.nan if value is None else float(value)


def length(history: Sequence[Mapping[str, Any]]) -> int:
    """The last round there is."""
    return int(history[-1]["round"]) if history else 0


def running_average(c: Curve, window: int = WINDOW) -> Curve:
    """At each round from `window` on, the mean of the evaluations in the last `window` rounds."""
    rounds = c.rounds[c.rounds >= window]
    means = [np.mean(c.values[(c.rounds > t - window) & (c.rounds <= t)]) for t in rounds]
    return Curve(rounds, np.array(means, float))


def mean_over_seeds(curves: Sequence[Curve]) -> Curve:
    """At the rounds that all of them evaluated."""
    common = common_rounds(curves)
    values = [c.values[np.isin(c.rounds, common)] for c in curves]
    return Curve(common, np.mean(values, axis=0))


def rounds_to(c: Curve, target: float) -> int | None:
    """The first round at which the running average reaches `target`; None if it never does."""
    smooth = running_average(c)
    reached = smooth.rounds[smooth.values >= target]
    return int(reached[0]) if len(reached) else None


def split_shown(history: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Whose examples the curve is of."""
    evaluated = [record for record in history if f"eval/{metric}" in record]
    same = [record.get(f"valid/{metric}") == record[f"eval/{metric}"] for record in evaluated]
    return "validation" if same and all(same) else "test"


def switch_round(history: Sequence[Mapping[str, Any]]) -> int | None:
    """The first round of the sampling phase, if burn-in came before it."""
    phases = [stage(record["phase"]) for record in history]
    if "sampling" in phases and "burn-in" in phases:
        return int(history[phases.index("sampling")]["round"])
    return None


def format_bytes(number: int) -> str:
    """11.6 MB."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
