"""The numbers of a comparison on one task, from its runs, for tables, curves and pages.

As in the paper's table 3, a method's row has means over seeds. A mean uses the same rounds of every
seed, and a difference the same rounds of both methods: runs that were interrupted or ended early
are compared at the rounds that all of them have.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedpa.errors import match_name, refuse, suggest
from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.bootstrap import Interval, interval_of_mean
from fedpa.experiments.report.curves import (
    WINDOW,
    Curve,
    Panel,
    Scale,
    align_curves,
    compute_finals,
    find_first_sampling,
    find_rounds_to,
    make_client_panels,
    make_diagnostics,
    make_learning_curves,
    make_privacy_panels,
    read_curve,
    read_last,
)
from fedpa.experiments.report.runs import SAME_NUMBERS, Group
from fedpa.experiments.tasks.task import tasks
from fedpa.metrics.metric import lower_is_better

COHORTS = ("clients_per_round", "task_options")
"""Settings, or tables of them, that with the seed determine cohorts and evaluation. The content of
the data does, its location does not."""


class Difference(NamedTuple):
    """Difference from the reference, paired by seed, at the same rounds."""

    mean: float
    interval: Interval | None
    round: int
    """The last round that all runs of both have."""


class Row(NamedTuple):
    method: str
    seeds: int
    round: int
    """The last round that all seeds have and, if any is evaluated, evaluated. The fields below
    refer to it, except `test` and `rounds_to`."""
    final: float
    """Mean over seeds."""
    interval: Interval | None
    """Interval of that mean; None for one seed."""
    difference: Difference | str | None
    """Or the reason why it is missing; None for the reference itself, and without one."""
    test: float
    """Value on the whole test split after each run's last round; mean over seeds."""
    ends: tuple[int, int]
    """The smallest and the largest of those rounds."""
    rounds_to: Mapping[float, Sequence[int | None]]
    """target → one number per seed; None if it was not reached."""
    seconds: float
    """Mean over seeds."""
    bytes_up: float
    bytes_down: float
    """Bytes of all clients, mean over seeds."""


class Contrast(NamedTuple):
    """A method and its control."""

    method: str
    control: str
    difference: Difference | str
    """Difference from the control, or the reason why it is missing."""
    isolates: str
    """The cause that a difference shows."""
    shares: str
    """What the control has in common with the method, besides what the reference has."""


class Comparison(NamedTuple):
    """The numbers of the methods of one task."""

    task: str
    groups: Sequence[Group]
    scale: Scale
    reference: str | None
    """The label of the method that differences refer to."""
    rows: Sequence[Row]
    """One for each group."""
    curves: Panel
    diagnostics: Sequence[Panel]
    clients: Sequence[Panel]
    unequal_burn_in: str | None = None
    """A warning if methods start sampling in different rounds."""
    contrasts: Sequence[Contrast] = ()
    """Methods with their controls, if these are compared, too."""
    privacy: Sequence[Panel] = ()
    """ε by round, if runs are private."""

    @property
    def rounds(self) -> int:
        """The largest number of rounds, planned or done."""
        runs = [run for group in self.groups for run in group.runs]
        return max(max(run.rounds, len(run.history)) for run in runs)

    @property
    def title(self) -> str:
        """digits, 60 rounds, 2 seeds."""
        counts = sorted({len(group.runs) for group in self.groups})
        seeds = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
        return f"{self.task}, {self.rounds} rounds, {seeds} seed{'s' if counts[-1] > 1 else ''}"


def compare_groups(
    groups: Sequence[Group], reference: str | None = None, scale: Scale | None = None
) -> list[Comparison]:
    """Compare the methods of each task, in the given order.

    Args:
        groups: The runs by method.
        reference: The name or label of the method that differences refer to; default: FedAvg,
            otherwise the first.
        scale: How the numbers are reported; default: the task's.
    """
    by_task = {
        task: [group for group in groups if group.task == task]
        for task in dict.fromkeys(group.task for group in groups)
    }
    if reference is not None:
        counts = [len(_find_groups(own, reference)) for own in by_task.values()]
        if not any(counts) or max(counts) > 1:
            labels = list(dict.fromkeys(group.label for group in groups))
            if any(counts):
                expected = f"matches several methods; choose from {', '.join(labels)}"
            else:
                expected = f"is not compared; {suggest(reference, labels)}"
            raise refuse("reference", reference, expected)
    return [_compare(own, reference, scale or choose_scale(own)) for own in by_task.values()]


def _compare(groups: Sequence[Group], reference: str | None, scale: Scale) -> Comparison:
    unequal = _describe_unequal_burn_in(groups)
    if unequal is not None:
        warnings.warn(unequal, stacklevel=3)
    chosen = None
    if len(groups) > 1:  # a single method has no reference
        named = _find_groups(groups, reference or "fedavg")
        chosen = named[0] if named else groups[0] if reference is None else None
    return Comparison(
        groups[0].task,
        groups,
        scale,
        None if chosen is None else chosen.label,
        [_compute_row(group, None if group is chosen else chosen, scale) for group in groups],
        make_learning_curves(groups, scale),
        make_diagnostics(groups),
        make_client_panels(groups),
        unequal,
        _contrast(groups, scale),
        make_privacy_panels(groups),
    )


def _contrast(groups: Sequence[Group], scale: Scale) -> list[Contrast]:
    """Compare methods with their controls."""
    found = []
    for control in groups:
        about = METHODS.get(control.runs[0].method or "")
        for group in groups if about is not None else ():
            if about is not None and group.runs[0].method in about.control_of:
                difference = _subtract(group, control, scale)
                found.append(
                    Contrast(group.label, control.label, difference, about.isolates, about.shares)
                )
    return found


def _find_groups(groups: Sequence[Group], wanted: str) -> list[Group]:
    """Find by label, then by name: labels are unique, names are not."""
    by_label = [group for group in groups if group.label == wanted]
    methods = [str(group.runs[0].settings.get("method")) for group in groups]
    return by_label or [
        group for group, name in zip(groups, methods, strict=True) if match_name(wanted, [name])
    ]


def choose_scale(groups: Sequence[Group]) -> Scale:
    """Choose the task's metric, targets and number of last rounds; guess them without a task."""
    task = tasks().get(groups[0].task)
    runs = [run for group in groups for run in group.runs]
    if task is None:
        keys = dict.fromkeys(key for run in runs for record in run.history for key in record)
        metrics = [key.removeprefix("eval/") for key in keys if key.startswith("eval/")]
        metric = next((name for name in metrics if name != "loss"), "loss")
        return Scale(metric, (), WINDOW, lower_is_better(metric))
    first = next(iter(task.presets.values()))
    presets = [task.presets.get(str(run.settings.get("preset")), first) for run in runs]
    targets = sorted({target for preset in presets for target in preset.targets})
    return Scale(task.metric, tuple(targets), min(preset.last for preset in presets))


def _compute_row(group: Group, reference: Group | None, scale: Scale) -> Row:
    curves = _read_curves(group, scale)
    finals = compute_finals(curves, scale.last)
    lengths = [len(history) for history in group.histories]
    evaluated, _ = align_curves(curves)
    until = int(evaluated[-1]) if len(evaluated) else min(lengths)
    tests = [read_last(history, f"test/{scale.metric}") for history in group.histories]

    def average_total(key: str) -> float:
        totals = [sum(r.get(key, 0) for r in history[:until]) for history in group.histories]
        return float(np.mean(totals))

    return Row(
        group.label,
        len(group.runs),
        until,
        float(np.mean(finals)),
        interval_of_mean(finals),
        None if reference is None else _subtract(group, reference, scale),
        float(np.mean(tests)),
        (min(lengths), max(lengths)),
        {
            target: [find_rounds_to(curve, target, scale.lower) for curve in curves]
            for target in scale.targets
        },
        average_total("seconds"),
        average_total("comm/bytes_up"),
        average_total("comm/bytes_down"),
    )


def _read_curves(group: Group, scale: Scale) -> list[Curve]:
    return [read_curve(history, f"eval/{scale.metric}") for history in group.histories]


def _subtract(group: Group, reference: Group, scale: Scale) -> Difference | str:
    """Compute the difference from the reference, or return the reason why there is none."""
    ours, theirs = _list_cohort_settings(group), _list_cohort_settings(reference)
    differ = [
        name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)
    ]
    if differ:
        return f"differs in {', '.join(differ)}"
    if [run.seed for run in group.runs] != [run.seed for run in reference.runs]:
        return "has other seeds"
    curves = [*_read_curves(group, scale), *_read_curves(reference, scale)]
    common, _ = align_curves(curves)
    if not len(common):
        return "has no evaluated round in common"
    own, others = np.split(np.array(compute_finals(curves, scale.last)), 2)
    paired = (own - others).tolist()
    return Difference(float(np.mean(paired)), interval_of_mean(paired), int(common[-1]))


def _list_cohort_settings(group: Group) -> dict[str, str]:
    settings = {
        name: repr(value)
        for name, value in group.runs[0].settings.items()
        if name.split(".")[0] in COHORTS and name not in SAME_NUMBERS
    }
    data = {str(run.environment.get("environment.data")) for run in group.runs}
    return settings | {"data": ", ".join(sorted(data))}


def _describe_unequal_burn_in(groups: Sequence[Group]) -> str | None:
    """Warn if methods start sampling in different rounds; seeds may, at their plateau."""
    starts: dict[int, dict[str, None]] = {}
    for group in groups:
        for history in group.histories:
            first = find_first_sampling(history)
            if first is not None:
                starts.setdefault(first, {})[group.label] = None
    if len({tuple(labels) for labels in starts.values()}) < 2:
        return None
    parts = []
    for t, labels in sorted(starts.items()):
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        parts.append(f"round {t}: {', '.join(list(labels)[:3])}{more}")
    return (
        f"the runs start sampling in different rounds ({'; '.join(parts)}), so their differences "
        "also depend on burn-in. Give all of them the same burn_in_rounds"
    )
