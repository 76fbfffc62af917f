"""The results table as texts in cells, for the page and for papers alike."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpa.report.bootstrap import LEVEL, Interval
from fedpa.report.file_progress import in_bytes
from fedpa.report.found_runs import Group, Scale
from fedpa.report.summary import WINDOW, split_shown
from fedpa.report.table import Row, reached, rows


class Results(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell is the method's label."""
    caption: str


def results(groups: Sequence[Group], scale: Scale) -> Results:
    """A row per method: means over seeds."""
    histories = {group.label: group.histories for group in groups}
    reference = _reference(groups)
    table = rows(histories, scale.metric, scale.targets, scale.last, reference)
    header = [
        "method",
        "seeds",
        f"final {scale.metric}",
        *([f"less {reference}"] if reference is not None else []),
        f"test {scale.metric}",
        *(f"rounds to {target:g}" for target in scale.targets),
        "seconds",
        "bytes up",
        "bytes down",
        "rejected",
    ]
    paired = reference is not None
    cells = [_cells(row, group, paired) for row, group in zip(table, groups, strict=True)]
    return Results(header, cells, _caption(groups, scale, table))


def _reference(groups: Sequence[Group]) -> str | None:
    """FedAvg, else the first, where all methods have the same seeds: differences are paired."""
    seeds = {tuple(run.seed for run in group.runs) for group in groups}
    if len(groups) < 2 or len(seeds) > 1:
        return None
    plain = [g.label for g in groups if g.runs[0].settings.get("method") == "fedavg"]
    return plain[0] if plain else groups[0].label


def _cells(row: Row, group: Group, paired: bool) -> list[str]:
    gap = row.difference
    less = "" if gap is None else _with_half(_number(gap.mean, "+.4f"), gap.interval)
    return [
        row.method,
        str(row.seeds),
        _with_half(_number(row.final, ".4f"), row.interval),
        *([less] if paired else []),
        _number(row.test, ".4f"),
        *(reached(numbers) for numbers in row.rounds_to.values()),
        _number(row.seconds, ".1f"),
        in_bytes(_per_seed(group, "comm/bytes_up")),
        in_bytes(_per_seed(group, "comm/bytes_down")),
        str(int(sum(_totals(group, "train/rejected")))),
    ]


def _with_half(text: str, interval: Interval | None) -> str:
    if interval is None or not math.isfinite(interval.half):
        return text
    return f"{text} ± {interval.half:.4f}"


def _totals(group: Group, key: str) -> list[float]:
    """Of each run, over its rounds."""
    return [float(np.nansum([r.get(key, 0) for r in h])) for h in group.histories]


def _per_seed(group: Group, key: str) -> int:
    return round(float(np.mean(_totals(group, key))))


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "–"


def _caption(groups: Sequence[Group], scale: Scale, table: Sequence[Row]) -> str:
    several = any(row.interval is not None for row in table)
    evaluated = [h for group in groups for h in group.histories if h]
    split = split_shown(evaluated[0], scale.metric) if evaluated else "test"
    deviation = f", ± half a {LEVEL:.0%} bootstrap interval over seeds" if several else ""
    parts = [
        f"final: mean of the {split} evaluations in the last {scale.last} rounds{deviation}",
        "test: after the last round, on all of the test split",
    ]
    if any(row.difference is not None for row in table):
        parts.insert(1, "less: the difference from the reference, seed by seed")
    if scale.targets:
        parts.append(f"rounds to: until the {WINDOW}-round average gets there, – if it never does")
    parts.append("seconds and bytes: of a whole run, mean over seeds; rejected: clients, all seeds")
    return "; ".join(parts) + "."
