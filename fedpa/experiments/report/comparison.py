"""Methods compared on one task: read from their runs once; tables, curves and pages show it.

As in the paper's table 3, a method's row has means over seeds. A mean over seeds is of the same
rounds of every seed, and a difference between methods of the same rounds of both: runs that were
cut, or ended early, are compared as far as all of them have come.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpa.errors import match_name, refuse
from fedpa.experiments.report.bootstrap import Interval, interval_of_mean
from fedpa.experiments.report.found_runs import Group, Scale, choose_scale, describe_unequal_burn_in
from fedpa.experiments.report.panels import Panel, diagnostics, learning_curves, over_clients
from fedpa.experiments.report.summary import (
    Curve,
    at_the_end,
    common_rounds,
    curve,
    finals,
    length,
    rounds_to,
)

COHORTS = ("clients_per_round", "task_options")
"""Settings, or tables of them, that with the seed decide which clients take part in a round and
what is evaluated; where the data lies does not, what it is does."""


class Difference(NamedTuple):
    """From the reference, seed by seed: the same cohorts and the same rounds on both sides."""

    mean: float
    interval: Interval | None
    round: int
    """The last round that all runs of both have."""


class Row(NamedTuple):
    method: str
    seeds: int
    round: int
    """The last that all seeds have and, if any is evaluated, evaluated; what follows is up to it,
    but for `test` and `rounds_to`."""
    final: float
    """Mean over seeds."""
    interval: Interval | None
    """Of that mean; None for one seed."""
    difference: Difference | None
    """None for the reference itself, without one, and where there is nothing to pair."""
    unpaired: str | None
    """Why there is nothing to pair."""
    test: float
    """Of each run's last round, on the whole test split; mean over seeds."""
    ends: tuple[int, int]
    """The least and the greatest of those rounds."""
    rounds_to: Mapping[float, Sequence[int | None]]
    """target → one number per seed; None where it was not reached."""
    seconds: float
    """Mean over seeds."""
    bytes_up: float
    bytes_down: float
    """Of all clients, mean over seeds."""


class Comparison(NamedTuple):
    """The methods of one task, in numbers."""

    task: str
    groups: Sequence[Group]
    scale: Scale
    reference: str | None
    """The label of the method that differences are from."""
    rows: Sequence[Row]
    """One for each group."""
    curves: Panel
    diagnostics: Sequence[Panel]
    over_clients: Sequence[Panel]
    unequal_burn_in: str | None = None
    """In which rounds the methods begin to sample, if not in the same."""

    @property
    def rounds(self) -> int:
        """The most rounds that a run is to have, or has."""
        runs = [run for group in self.groups for run in group.runs]
        return max(max(run.rounds, len(run.history)) for run in runs)


def compare_groups(
    groups: Sequence[Group], reference: str | None = None, scale: Scale | None = None
) -> list[Comparison]:
    """Compare the methods of each task, in the order they came.

    Args:
        groups: The runs by method.
        reference: The name or label of the method that differences are from; default: FedAvg, else
            the first.
        scale: How the numbers are reported; default: as the task has it.
    """
    if reference is not None:
        _check_reference(groups, reference)
    found = []
    for task in dict.fromkeys(group.task for group in groups):
        own = [group for group in groups if group.task == task]
        place, measure = _find_reference(own, reference), scale or choose_scale(own)
        unequal = describe_unequal_burn_in(own)
        if unequal is not None:
            warnings.warn(unequal, stacklevel=2)
        found.append(
            Comparison(
                task,
                own,
                measure,
                None if place is None else own[place].label,
                compute_rows(own, measure, place),
                learning_curves(own, measure),
                diagnostics(own),
                over_clients(own),
                unequal,
            )
        )
    return found


def compute_rows(groups: Sequence[Group], scale: Scale, reference: int | None = None) -> list[Row]:
    """One row for each method; `reference`: the place of the one others are compared with."""
    key = f"eval/{scale.metric}"
    curves = [[curve(history, key) for history in group.histories] for group in groups]
    found = []
    for place, (group, own) in enumerate(zip(groups, curves, strict=True)):
        values = finals(own, scale.last)
        gap: Difference | str | None = None
        if reference is not None and place != reference:
            gap = _difference(group, groups[reference], own, curves[reference], scale.last)
        lengths = [length(history) for history in group.histories]
        evaluated = common_rounds(own)
        until = int(evaluated[-1]) if len(evaluated) else min(lengths)
        tests = [at_the_end(history, f"test/{scale.metric}") for history in group.histories]
        found.append(
            Row(
                group.label,
                len(group.runs),
                until,
                float(np.mean(values)),
                interval_of_mean(values),
                gap if isinstance(gap, Difference) else None,
                gap if isinstance(gap, str) else None,
                float(np.mean(tests)),
                (min(lengths), max(lengths)),
                {target: [rounds_to(c, target) for c in own] for target in scale.targets},
                *(
                    _total(group, key, until)
                    for key in ("seconds", "comm/bytes_up", "comm/bytes_down")
                ),
            )
        )
    return found


def _total(group: Group, key: str, until: int) -> float:
    """Of the rounds up to `until`, mean over seeds."""
    totals = [sum(r.get(key) or 0 for r in h if r["round"] <= until) for h in group.histories]
    return float(np.mean(totals))


def _difference(
    group: Group, other: Group, own: Sequence[Curve], others: Sequence[Curve], last: int
) -> Difference | str:
    """Or why there is none."""
    ours, theirs = _cohorts(group), _cohorts(other)
    differ = [
        name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)
    ]
    if differ:
        return f"differs in {', '.join(differ)}"
    if [run.seed for run in group.runs] != [run.seed for run in other.runs]:
        return "has other seeds"
    common = common_rounds([*own, *others])
    if not len(common):
        return "has no evaluated round in common"
    values = finals([*own, *others], last)
    paired = [a - b for a, b in zip(values[: len(own)], values[len(own) :], strict=True)]
    return Difference(float(np.mean(paired)), interval_of_mean(paired), int(common[-1]))


def _cohorts(group: Group) -> dict[str, str]:
    settings = {
        name: repr(value)
        for name, value in group.runs[0].settings.items()
        if name.split(".")[0] in COHORTS and name != "task_options.data_dir"
    }
    data = {str(run.environment.get("environment.data")) for run in group.runs}
    return settings | {"data": ", ".join(sorted(data))}


def _find_reference(groups: Sequence[Group], wanted: str | None) -> int | None:
    """The reference's place among the groups of a task: the one named, by label or by method.

    FedAvg, else the first, if none is named; None for one method alone, and where the one that is
    named does not take part.
    """
    if len(groups) < 2:
        return None
    if wanted is not None:
        found = _named(groups, wanted)
        return found[0] if len(found) == 1 else None
    plain = _named(groups, "fedavg")
    return plain[0] if plain else 0


def _check_reference(groups: Sequence[Group], wanted: str) -> None:
    """Refuse a name that none of the groups has, or several of one task."""
    tasks = list(dict.fromkeys(group.task for group in groups))
    by_task = [[group for group in groups if group.task == task] for task in tasks]
    counts = [len(_named(own, wanted)) for own in by_task]
    if not any(counts) or max(counts) > 1:
        labels = ", ".join(dict.fromkeys(group.label for group in groups))
        what = "stands for several" if any(counts) else "does not take part"
        raise refuse("reference", wanted, f"{what}; choose from {labels}")


def _named(groups: Sequence[Group], wanted: str) -> list[int]:
    """Labels first: no two are the same, methods of other settings have one name."""
    by_label = [k for k, group in enumerate(groups) if group.label == wanted]
    by_method = [
        k
        for k, g in enumerate(groups)
        if match_name(wanted, [str(g.runs[0].settings.get("method"))])
    ]
    return by_label or by_method
