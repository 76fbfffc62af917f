"""The results table as texts in cells, for the page and for papers alike."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpa.experiments.report.file_progress import in_bytes
from fedpa.experiments.report.found_runs import Group, Scale, describe_unequal_burn_in
from fedpa.experiments.report.reference import reference_of
from fedpa.experiments.report.summary import WINDOW, split_shown
from fedpa.experiments.report.table import (
    Measured,
    Row,
    deviation,
    less,
    number,
    on_test,
    reached,
    rows,
    standing,
    unpaired,
    with_half,
)

COHORTS = ("clients_per_round", "task_options")
"""Settings, or tables of them, that with the seed decide which clients take part in a round and
what is evaluated; where the data lies does not, what it is does."""


class Results(NamedTuple):
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell is the method's label, with how far it has come where that is not all."""
    caption: str


def results(groups: Sequence[Group], scale: Scale, reference: str | None = None) -> Results:
    """A row per method: means over seeds."""
    place = reference_of(groups, reference)
    measured = [
        Measured(g.label, g.histories, [r.seed for r in g.runs], _cohorts(g)) for g in groups
    ]
    table = rows(measured, scale.metric, scale.targets, scale.last, place)
    unequal = describe_unequal_burn_in(groups)
    if unequal is not None:
        warnings.warn(unequal, stacklevel=2)
    against = None if place is None else groups[place].label
    header = [
        "method",
        "seeds",
        f"final {scale.metric}",
        *([f"less {against}"] if against is not None else []),
        f"test {scale.metric}",
        *(f"rounds to {target:g}" for target in scale.targets),
        "seconds",
        "bytes up",
        "bytes down",
        "rejected",
    ]
    rounds = longest(groups)
    cells = [
        _cells(row, group, rounds, against is not None)
        for row, group in zip(table, groups, strict=True)
    ]
    return Results(header, cells, _caption(groups, scale, table, against, unequal))


def longest(groups: Sequence[Group]) -> int:
    """The most rounds that a run is to have, or has."""
    return max(max(run.rounds, len(run.history)) for group in groups for run in group.runs)


def _cohorts(group: Group) -> dict[str, str]:
    settings = {
        name: repr(value)
        for name, value in group.runs[0].settings.items()
        if name.split(".")[0] in COHORTS and name != "task_options.data_dir"
    }
    data = {str(run.environment.get("environment.data")) for run in group.runs}
    return settings | {"data": ", ".join(sorted(data))}


def _cells(row: Row, group: Group, rounds: int, paired: bool) -> list[str]:
    return [
        _marked(row, group, rounds),
        str(row.seeds),
        with_half(row.final, ".4f", row.interval),
        *([less(row)] if paired else []),
        on_test(row),
        *(reached(numbers) for numbers in row.rounds_to.values()),
        number(row.seconds, ".1f"),
        in_bytes(round(row.bytes_up)),
        in_bytes(round(row.bytes_down)),
        str(sum(_rejected(history) for history in group.histories)),
    ]


def _marked(row: Row, group: Group, rounds: int) -> str:
    unfinished = sum(not run.finished for run in group.runs)
    marks = [standing(row, rounds), f"{unfinished} unfinished" if unfinished else None]
    told = ", ".join(mark for mark in marks if mark)
    return f"{row.method} ({told})" if told else row.method


def _rejected(history: Sequence[dict[str, object]]) -> int:
    return int(np.nansum([r.get("train/rejected", 0) for r in history]))


def _caption(
    groups: Sequence[Group],
    scale: Scale,
    table: Sequence[Row],
    reference: str | None,
    unequal: str | None,
) -> str:
    evaluated = [h for group in groups for h in group.histories if h]
    split = split_shown(evaluated[0], scale.metric) if evaluated else "test"
    parts = [
        f"final: mean of the {split} evaluations in the last {scale.last} rounds{deviation(table)}",
        "test: after each run's last round, on all of the test split",
    ]
    if any(row.difference is not None for row in table):
        parts.insert(1, "less: the difference from the reference, seed by seed, at the same rounds")
    if scale.targets:
        parts.append(
            f"rounds to: until the {WINDOW}-round average gets there, – if it has not so far"
        )
    parts.append("seconds and bytes: of a run, mean over seeds; rejected: clients, all seeds")
    if any(standing(row, longest(groups)) for row in table):
        parts.append(
            "at round: the last that all seeds have, up to which final, seconds, bytes are"
        )
    if reference is not None:
        parts += unpaired(table, reference)
    if unequal is not None:
        parts.append(unequal)
    return "; ".join(parts) + "."
