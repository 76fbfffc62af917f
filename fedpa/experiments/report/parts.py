"""What a report has to show, task by task: for the page and for the figures beside it."""

from collections.abc import Sequence
from typing import NamedTuple

from fedpa.experiments.report.found_runs import Group, Scale, scale_of
from fedpa.experiments.report.panels import Panel, diagnostics, learning_curves, over_clients
from fedpa.experiments.report.reference import check_reference
from fedpa.experiments.report.results import Results, results


class Part(NamedTuple):
    """What a report has on one task."""

    task: str
    groups: Sequence[Group]
    scale: Scale
    results: Results
    curves: Panel
    diagnostics: Sequence[Panel]
    over_clients: Sequence[Panel]


def parts(groups: Sequence[Group], reference: str | None = None) -> list[Part]:
    """One for each task, in the order they came; `reference`: a method's name or label."""
    if reference is not None:
        check_reference(groups, reference)
    found = []
    for task in dict.fromkeys(group.task for group in groups):
        own = [group for group in groups if group.task == task]
        scale = scale_of(own)
        found.append(
            Part(
                task,
                own,
                scale,
                results(own, scale, reference),
                learning_curves(own, scale),
                diagnostics(own),
                over_clients(own),
            )
        )
    return found
