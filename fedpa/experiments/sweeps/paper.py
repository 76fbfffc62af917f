"""As the paper chose its hyperparameters: in two stages.

First the rates and the number of local epochs, on FedAvg; then, with those fixed, burn-in rounds
and ρ, on FedPA. Each stage is a sweep of its own, in a directory of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError
from fedpa.experiments.config import table_of
from fedpa.experiments.sweeps.search import Trial, find_best
from fedpa.experiments.sweeps.space import Space
from fedpa.experiments.sweeps.sweep import (
    BEST,
    NOT_COMPARED,
    Sweep,
    as_table,
    check_same,
    has_stages,
    is_sweep,
    parse_sweep,
)
from fedpa.training.run_directory import check_free, lock_directory, writing

SETTINGS = "stages.toml"
STAGES = ("1-fedavg", "2-fedpa")
SAMPLING = ("burn_in_rounds", "rho")
"""What FedAvg does not have."""

Perform = Callable[[Sweep, Path], Sequence[Trial]]
"""A sweep, in a directory."""


class Stages(NamedTuple):
    training: Sweep
    sampling: Sweep
    """Its base has the rates that are used if the first stage chooses none."""


def split_space(space: Space) -> tuple[Space, Space]:
    """The first stage's hyperparameters, and the second's."""
    first = {name: values for name, values in space.items() if name not in SAMPLING}
    second = {name: values for name, values in space.items() if name in SAMPLING}
    if not first or not second:
        missing = "rate or number of epochs" if not first else "burn_in_rounds or rho"
        raise FedpaError(f"space: --paper has two stages, and there is no {missing} to choose")
    return first, second


def second_stage(stages: Stages, trials: Sequence[Trial]) -> Sweep:
    """FedPA's sweep with what the first stage found."""
    top = find_best(trials)
    if top is None:
        raise FedpaError("no trial of the first stage has a value: there is nothing to go on with")
    base = stages.sampling.base
    fixed = dataclasses.replace(base.hyperparameters, **top.params)
    return stages.sampling._replace(base=dataclasses.replace(base, hyperparameters=fixed))


def are_stages(out: Path) -> bool:
    return (out / SETTINGS).is_file()


def read_stages(out: Path) -> Stages:
    """Both sweeps of the directory, as they were begun."""
    path = out / SETTINGS
    values = table_of("out", path)
    try:
        return Stages(*(parse_sweep(values[name], path) for name in Stages._fields))
    except KeyError as error:
        raise FedpaError(f"{path} is not of a sweep in stages: {error} is missing") from None


def check_stages_place(out: Path, stages: Stages) -> None:
    """Refuse a directory that holds something else, or stages of other settings."""
    if is_sweep(out):
        raise FedpaError(
            f"out = {str(out)!r}: holds a sweep without stages: leave --paper out, or give another "
            "directory"
        )
    if are_stages(out):
        left_out = [f"{stage}.{name}" for stage in Stages._fields for name in NOT_COMPARED]
        check_same(out, table_of("out", out / SETTINGS), _as_table(stages), left_out)
    elif not has_stages(out):
        check_free(out, overwrite=None)


def _as_table(stages: Stages) -> dict[str, Any]:
    return {name: as_table(stage) for name, stage in stages._asdict().items()}


def run_stages(stages: Stages, out: Path, perform: Perform) -> tuple[Sweep, Sequence[Trial]]:
    """Both sweeps; the second as it was run, its trials, and its best at the top of `out`."""
    check_stages_place(out, stages)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        with writing(out):
            write_atomically(out / SETTINGS, tomli_w.dumps(_as_table(stages)).encode())
        first = perform(stages.training, out / STAGES[0])
        settings = second_stage(stages, first)
        trials = perform(settings, out / STAGES[1])
        if find_best(trials) is not None:
            with writing(out):
                write_atomically(out / BEST, (out / STAGES[1] / BEST).read_bytes())
    return settings, trials
