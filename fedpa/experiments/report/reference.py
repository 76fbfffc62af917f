"""The method that the others of a report are compared with."""

from collections.abc import Sequence

from fedpa.discovery import match_name
from fedpa.errors import refuse
from fedpa.experiments.report.found_runs import Group


def reference_of(groups: Sequence[Group], wanted: str | None = None) -> int | None:
    """Its place among the groups of a task: the one named, by label or by method.

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


def check_reference(groups: Sequence[Group], wanted: str) -> None:
    """Refuse a name that none of the groups has, or several of one task."""
    tasks = list(dict.fromkeys(group.task for group in groups))
    by_task = [[group for group in groups if group.task == task] for task in tasks]
    counts = [len(_named(own, wanted)) for own in by_task]
    if not any(counts) or max(counts) > 1:
        labels = ", ".join(dict.fromkeys(group.label for group in groups))
        what = "stands for several" if any(counts) else "does not take part"
        raise refuse("reference", wanted, f"{what}; choose from {labels}")


def _named(groups: Sequence[Group], wanted: str) -> list[int]:
    """Labels first: they are told apart, methods of other settings have one name."""
    by_label = [k for k, group in enumerate(groups) if group.label == wanted]
    by_method = [
        k
        for k, g in enumerate(groups)
        if match_name(wanted, [str(g.runs[0].settings.get("method"))])
    ]
    return by_label or by_method
