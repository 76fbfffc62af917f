"""What the processes' reports come to: medians, spreads, ratios, and whether work was equal."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.systems import OURS
from benchmarks.works import Work

CNN_FLOP = 72e6
"""Of a training step of the CNN, per example."""

Report = Mapping[str, Any]


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def text(self, unit: float = 1.0) -> str:
        low, high = (significant(v * unit) for v in (self.low, self.high))
        return f"{significant(self.median * unit)} ({low}–{high})"


class Row(NamedTuple):
    system: str
    seconds: Spread | None
    """Per round, over all timed rounds of all processes: median and quartiles."""
    ratio: Spread | None
    """The peer's seconds over ours, from the medians of processes that ran one after the other:
    median, smallest and largest. Above 1, ours is faster."""
    loss: float | None
    status: str
    """`ok`, `unchecked`, or what is wrong."""
    versions: Mapping[str, str]


def rows(work: Work, reports: Mapping[str, Sequence[Report]]) -> list[Row]:
    """One row per system; `reports` has a list of each system's processes, in their order."""
    ours = reports.get(OURS, [])
    return [_row(work, system, runs, ours) for system, runs in reports.items()]


def _row(work: Work, system: str, runs: Sequence[Report], ours: Sequence[Report]) -> Row:
    good = [run for run in runs if "failed" not in run]
    if not good:
        why = runs[0]["failed"] if runs else "did not run"
        return Row(system, None, None, None, f"failed: {why}", {})
    loss = statistics.fmean(run["loss"] for run in good)
    return Row(
        system,
        quartiles([second for run in good for second in run["seconds"]]),
        None if system == OURS else ratios(runs, ours),
        loss,
        status(work, runs, ours),
        good[-1].get("versions", {}),
    )


def status(work: Work, runs: Sequence[Report], ours: Sequence[Report]) -> str:
    """Nobody wins by doing less: every process must end at the loss that ours ends at."""
    failed = sum("failed" in run for run in runs)
    if failed:
        return f"invalid: {failed} of {len(runs)} processes failed"
    known = [run["loss"] for run in ours if "failed" not in run]
    if not known:
        return "unchecked"
    expected = statistics.median(known)
    for run in runs:
        # Not `> tolerance`: a loss that is not a number is no agreement.
        if not abs(run["loss"] - expected) <= work.tolerance * abs(expected):
            return f"invalid: loss {run['loss']:.4g}, ours {expected:.4g}"
    return "ok"


def ratios(runs: Sequence[Report], ours: Sequence[Report]) -> Spread | None:
    pairs = [
        statistics.median(a["seconds"]) / statistics.median(b["seconds"])
        for a, b in zip(runs, ours, strict=False)
        if "failed" not in a and "failed" not in b
    ]
    return Spread(statistics.median(pairs), min(pairs), max(pairs)) if pairs else None


def quartiles(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def share_of_peak(work: Work, seconds: float, peak: float) -> float:
    """The part of the matrix-product peak that a round of the CNN reaches."""
    return CNN_FLOP * work.clients * work.examples * work.epochs / seconds / peak


def significant(value: float) -> str:
    """Three digits, no exponent."""
    if value == 0 or value != value:
        return f"{value:g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.2e}"
