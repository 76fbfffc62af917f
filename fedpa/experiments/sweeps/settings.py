"""What a sweep is, and `sweep.toml`, which says it: all that decides its trials."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError
from fedpa.experiments.config import RunConfig, from_table, table_of
from fedpa.experiments.config import as_table as run_table
from fedpa.experiments.sweeps import space as spaces
from fedpa.experiments.sweeps.search import Search, chosen_search
from fedpa.experiments.sweeps.space import Space
from fedpa.training.provenance import differences
from fedpa.training.run_directory import check_free, writing

SWEEP = "sweep.toml"
NOT_COMPARED = ("run.recording", "run.task_options.data_dir")
"""What changes no number, as in runs."""
MOST_NAMED = 5
"""Differences that are told one by one."""


class Sweep(NamedTuple):
    base: RunConfig
    """What the trials have in common; not resolved, since a field may follow from a swept one."""
    space: Space
    search: Search
    by: str | None = None
    """The metric that decides, loss say; the task's own if not given."""


def checked(settings: Sweep) -> Sweep:
    """Refuse what can't be run, before anything is; in a standard form, places absolute."""
    settings = settings._replace(space=spaces.ordered(settings.space))
    resolved = spaces.configured(settings.base, spaces.first_point(settings.space))
    spaces.check_space(settings.space, settings.base)
    base = dataclasses.replace(
        settings.base, task_options=resolved.task_options, init=resolved.init
    )
    return settings._replace(base=base)


def as_table(settings: Sweep) -> dict[str, Any]:
    """As `sweep.toml` has it; of what is swept the space speaks alone."""
    run = run_table(settings.base)
    kept = {k: v for k, v in run["hyperparameters"].items() if k not in settings.space}
    return {
        **({} if settings.by is None else {"by": settings.by}),
        "search": settings.search._asdict(),
        "space": spaces.as_table(settings.space),
        "run": run | {"hyperparameters": kept},
    }


def is_sweep(out: Path) -> bool:
    return (out / SWEEP).is_file()


def has_stages(out: Path) -> bool:
    """Whether sweeps lie below it."""
    return any(out.glob(f"*/{SWEEP}"))


def read_settings(out: Path) -> Sweep:
    """The sweep that lies there."""
    path = out / SWEEP
    return from_values(table_of("out", path), path)


def from_values(values: Mapping[str, Any], path: Path) -> Sweep:
    """A sweep from what `as_table` gives, as it was found in a file."""
    try:
        search, run = dict(values["search"]), dict(values["run"])
        space = spaces.parsed(values["space"], f"{path} [space]")
        found = chosen_search(
            search["kind"], space, search["trials"], search["seed"], search["prune"]
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FedpaError):
            raise
        raise FedpaError(f"{path} is not of a sweep: {error} is missing or wrong") from None
    by = None if values.get("by") is None else str(values["by"])
    return Sweep(from_table(run, f"{path} [run]", of_run=False), space, found, by)


def check_place(out: Path, settings: Sweep) -> None:
    """Refuse a directory that holds something else, or a sweep of other settings.

    Random search and TPE may be given more trials: those that there are stay as they are.
    """
    if not is_sweep(out):
        if has_stages(out):
            raise FedpaError(
                f"out = {str(out)!r}: holds a sweep in stages: `fedpa sweep --out {out}` goes on "
                "with it; give another directory"
            )
        check_free(out, overwrite=None)
        return
    then, now = table_of("out", out / SWEEP), as_table(settings)
    left_out = list(NOT_COMPARED)
    try:
        fewer = settings.search.trials < then["search"]["trials"]
    except (KeyError, TypeError):
        fewer = True
    if settings.search.kind != "grid" and not fewer:
        left_out.append("search.trials")
    check_same(out, then, now, left_out)


def check_same(
    out: Path, then: Mapping[str, Any], now: Mapping[str, Any], left_out: Sequence[str]
) -> None:
    """Refuse other settings than those of the sweep that lies there."""
    changed = differences(then, now, left_out)
    if changed:
        more = f"; and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        raise FedpaError(
            f"out = {str(out)!r}: holds a sweep of other settings: "
            f"{'; '.join(changed[:MOST_NAMED])}{more}; `fedpa sweep --out {out}` goes on with it; "
            "for others give another directory"
        )


def write_settings(out: Path, settings: Sweep) -> None:
    with writing(out):
        write_atomically(out / SWEEP, tomli_w.dumps(as_table(settings)).encode())
