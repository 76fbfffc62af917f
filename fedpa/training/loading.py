"""`fedpa.load`, `fedpa.resume` and `fedpa.export`: a recorded run and its parameters.

A run's `config.toml` names in `[environment] made_by` the module that assembled it. That module has
`load_model(directory)`, which gives configuration, problem and an untrained model, and `resume`. A
run without one was made by `fedpa.fit`, whose functions no file can hold.
"""

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from fedpa.errors import FedpaError, refuse
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, best_round
from fedpa.training.checkpoint import list_checkpoints, read_checkpoint, read_last_checkpoint
from fedpa.training.history import History
from fedpa.training.loop import Fit
from fedpa.training.named_arrays import (
    check_format,
    fill_model,
    read_arrays,
    read_npz,
    to_portable,
    write_arrays,
)
from fedpa.training.problem import Problem
from fedpa.training.run_directory import METRICS, PARAMS, Recorded, read_run

MADE_BY = "made_by"


class Run(NamedTuple):
    params: Any
    """The model with its parameters; of a run by `fedpa.fit`, if no model was given to fill, the
    arrays by name."""
    config: Any
    """`RunConfig`; of a run by `fedpa.fit`, the table of its settings."""
    metrics: History
    """One record per round."""
    round: int
    """Whose parameters these are."""
    problem: Problem | None
    """The task: its loss, its metric, its data; None of a run by `fedpa.fit`."""


def load(directory: str | Path, which: str | int = "last", params: Any = None) -> Run:
    """Load a run. One that is not finished is as far as its last checkpoint.

    Args:
        directory: The run's directory.
        which: The parameters of the `last` round, of the `best`, or of a numbered one that has a
            checkpoint.
        params: For a run by `fedpa.fit`, a model of the same kind, to be filled.
    """
    out = Path(directory)
    recorded = read_run(out)
    t, arrays = read_params(recorded, parse_round("which", which))
    metrics = History()
    if (out / METRICS).is_file():
        metrics = run_directory.read_metrics(out, torn=recorded.summary is None)
    maker = _import_maker(recorded)
    if maker is None:
        model = dict(arrays) if params is None else fill_model(params, arrays, repr(str(out)))
        return Run(model, recorded.settings, metrics, t, None)
    config, problem, model = maker.load_model(out)
    return Run(fill_model(model, arrays, repr(str(out))), config, metrics, t, problem)


def resume(
    directory: str | Path,
    *,
    rounds: int | None = None,
    anyway: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Continue a run from its last checkpoint; the result is that of an uninterrupted one.

    Args:
        directory: The run's directory. A finished run is returned as it is.
        rounds: The total number of rounds, if other than configured.
        anyway: Continue although versions or data have changed.
        callbacks: Called after every round.
    """
    out = Path(directory)
    maker = _import_maker(read_run(out))
    if maker is None:
        raise FedpaError(
            f"{str(out)!r} was made by fedpa.fit: the same call, with out={str(out)!r}, resumes it"
        )
    fit: Fit = maker.resume(out, rounds=rounds, anyway=anyway, callbacks=callbacks)
    return fit


def _import_maker(recorded: Recorded) -> ModuleType | None:
    """Import the module that assembled the run; None if it was `fedpa.fit`."""
    name = recorded.environment.get(MADE_BY)
    if name is None:
        return None
    config = str(recorded.out / run_directory.CONFIG)
    try:
        maker = importlib.import_module(str(name))
    except ImportError as error:
        raise FedpaError(f"{config!r}: {MADE_BY} = {name!r} can't be imported: {error}") from None
    if not hasattr(maker, "load_model"):
        raise FedpaError(f"{config!r}: {MADE_BY} = {name!r} loads no runs")
    return maker


def export(
    directory: str | Path,
    path: str | Path,
    which: str | int = "last",
    overwrite: bool = False,
) -> int:
    """Write a run's parameters to a .npz or .safetensors file; the round they are of.

    which: `last`, `best` or the number of a round that has a checkpoint. Names are the arrays'
    places in the model's tree: layers/0/weight.
    """
    out, path = Path(directory), Path(path)
    check_format("path", path)
    if path.exists() and not overwrite:
        raise refuse("path", str(path), "exists already: choose another, or give --overwrite")
    recorded = read_run(out)
    settings, environment = recorded.settings, recorded.environment
    t, arrays = read_params(recorded, parse_round("which", which))
    about = {
        "format": "fedpa",
        "version": environment.get("versions", {}).get("fedpa", "unknown"),
        "task": str(settings.get("task", "")),
        "method": str(settings.get("method", "")),
        "round": str(t),
    }
    run_directory.check_writable(path.parent)
    with run_directory.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, about)
    return t


def read_initial(source: str, which: str = "last") -> dict[str, np.ndarray]:
    """What a warm start begins with: a run's parameters, or a file of them."""
    path = Path(source)
    if path.is_file():
        if which != "last":
            raise refuse(
                "init_round", which, f"{source} is a file: it has no rounds to choose from"
            )
        return read_arrays(path)
    if not path.is_dir():
        raise refuse("init", source, "is neither a run's directory nor a file of parameters")
    return read_params(read_run(path), parse_round("init_round", which))[1]


def parse_round(field: str, word: str | int) -> str | int:
    """`last`, `best` or the number of a round, which may be a word."""
    if word in ("last", "best"):
        return word
    if isinstance(word, str) and not word.isdecimal():
        raise refuse(field, word, "must be last, best or the number of a round")
    return int(word)


def read_params(recorded: Recorded, which: str | int = "last") -> tuple[int, dict[str, np.ndarray]]:
    """(round, the model's trained arrays by name) of the last, the best or a numbered round.

    A run that is not finished is as far as its last checkpoint.
    """
    out, summary = recorded.out, recorded.summary
    if which == "last":
        if summary is not None and (out / PARAMS).is_file():
            try:
                return summary["round"], read_npz(out / PARAMS)
            except FedpaError as error:
                warnings.warn(f"{error}; the last checkpoint is taken", stacklevel=2)
        stored = read_last_checkpoint(out)
    else:
        wanted = _find_best(recorded) if which == "best" else int(which)
        stored = read_checkpoint(out, wanted) if wanted in list_checkpoints(out) else None
    if stored is None:
        there = list_checkpoints(out)
        have = f"there are {', '.join(map(str, there))}" if there else "there is none"
        name = f"the {which} round" if isinstance(which, str) else f"round {which}"
        raise FedpaError(f"{str(out)!r} has no checkpoint of {name}: {have}")
    return stored.round, {
        name.removeprefix("params/"): to_portable(array)
        for name, array in stored.arrays.items()
        if name.startswith("params/")
    }


def _find_best(recorded: Recorded) -> int | None:
    if recorded.summary is not None:
        return (recorded.summary.get("best") or {}).get("round")
    stored = read_last_checkpoint(recorded.out)
    return None if stored is None else best_round(stored.memory)
