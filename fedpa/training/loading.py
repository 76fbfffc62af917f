"""`fedpa.load` and `fedpa.resume`: a recorded run, whoever made it.

A run's `config.toml` names in `[environment] made_by` the module that assembled it. That module has
`load_model(directory)`, which gives configuration, problem and an untrained model, and `resume`. A
run without one was made by `fedpa.fit`, whose functions no file can hold.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedpa.errors import FedpaError
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.history import History
from fedpa.training.loop import Fit
from fedpa.training.parameter_files import warmed, which_round
from fedpa.training.problem import Problem
from fedpa.training.run_directory import METRICS

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
    settings, _ = run_directory.read_config(out)
    t, arrays = run_directory.stored_arrays(out, which_round("which", which))
    finished = run_directory.read_summary(out) is not None
    metrics = History()
    if (out / METRICS).is_file():
        metrics = run_directory.read_metrics(out, torn=not finished)
    maker = import_maker(out)
    if maker is None:
        filled = dict(arrays) if params is None else warmed(params, arrays, repr(str(out)))
        return Run(filled, settings, metrics, t, None)
    config, problem, model = maker.load_model(out)
    return Run(warmed(model, arrays, repr(str(out))), config, metrics, t, problem)


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
    maker = import_maker(out)
    if maker is None:
        raise FedpaError(
            f"{str(out)!r} was made by fedpa.fit: the same call, with out={str(out)!r}, resumes it"
        )
    fit: Fit = maker.resume(out, rounds=rounds, anyway=anyway, callbacks=callbacks)
    return fit


def import_maker(out: Path) -> ModuleType | None:
    """The module that assembled the run; None if it was `fedpa.fit`."""
    _, environment = run_directory.read_config(out)
    name = environment.get(MADE_BY)
    if name is None:
        return None
    try:
        maker = importlib.import_module(str(name))
    except ImportError as error:
        raise FedpaError(
            f"{str(out / run_directory.CONFIG)!r}: {MADE_BY} = {name!r} can't be imported: {error}"
        ) from None
    if not hasattr(maker, "load_model"):
        raise FedpaError(f"{str(out / run_directory.CONFIG)!r}: {MADE_BY} = {name!r} loads no runs")
    return maker
