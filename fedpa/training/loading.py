"""`fedpa.load`: a run's model, parameters, configuration and metrics, finished or not."""

from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedpa.experiments.config import RunConfig, read_toml, resolve
from fedpa.experiments.tasks.task import Problem, task_named
from fedpa.training import run_directory
from fedpa.training.history import History
from fedpa.training.parameter_files import warmed, which_round
from fedpa.training.run_directory import CONFIG, METRICS


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
    """A run. One that is not finished is as far as its last checkpoint.

    which: the parameters of the `last` round, of the `best`, or of a numbered one that has a
        checkpoint.
    params: for a run by `fedpa.fit`, a model of the same kind, to be filled.
    """
    out = Path(directory)
    settings, _ = run_directory.read_config(out)
    t, arrays = run_directory.stored_arrays(out, which_round("which", which))
    finished = run_directory.read_summary(out) is not None
    metrics = History()
    if (out / METRICS).is_file():
        metrics = run_directory.read_metrics(out, torn=not finished)
    if "task" not in settings:
        filled = dict(arrays) if params is None else warmed(params, arrays, repr(str(out)))
        return Run(filled, settings, metrics, t, None)
    config: RunConfig = resolve(read_toml(out / CONFIG))
    problem = task_named(config.task).load(config.task_options)
    model = warmed(problem.init(jax.random.key(config.seed)), arrays, repr(str(out)))
    return Run(model, config, metrics, t, problem)
