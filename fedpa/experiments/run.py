"""One run of a task from its configuration, recorded in a directory, resumable."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedpa.algorithms.fedopt import Algorithm
from fedpa.data.pooled import pooled
from fedpa.engines import engines
from fedpa.engines.distributed import is_first
from fedpa.engines.engine import Engine
from fedpa.errors import FedpaError, refuse
from fedpa.experiments.config import RunConfig, as_table, read_toml, resolve
from fedpa.experiments.methods import METHODS, label_method
from fedpa.experiments.tasks.task import task_named
from fedpa.training import parameter_files, run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.conducting import Place, Training, conduct
from fedpa.training.directories import branched, go_on, new_directory
from fedpa.training.evaluation import at_rounds, on_all_of_test, reported, task_evaluation
from fedpa.training.fit import prepared_task
from fedpa.training.loop import Fit, check_callbacks
from fedpa.training.problem import Problem
from fedpa.training.provenance import data_fingerprint, environment
from fedpa.training.recording import Made, begin, check_settings
from fedpa.training.stopping import Best, remember_best, stops
from fedpa.training.whole_files import read_npz
from fedpa.types import Params

Elsewhere = Callable[[Algorithm, Params], tuple[Algorithm, Engine]]
"""As `fedpa.flower.serving` has it, which needs Flower."""


def run(
    config: RunConfig,
    out: Path | None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
    branch: Path | None = None,
    elsewhere: Elsewhere | None = None,
) -> Fit:
    """Train as configured, recorded in `out`, if there is one, which must hold no run.

    problem: the task, if it is loaded already.
    branch: a run whose rounds this one would have had as its first, too: it goes on from there.
    elsewhere: where clients run, if not in one of the engines that the configuration can name.
    """
    config = resolve(config)
    check_callbacks(callbacks)
    if out is not None and is_first():
        run_directory.check_free(out, overwrite)
    problem = task_named(config.task).load(config.task_options) if problem is None else problem
    arrays = check_run(config, problem)
    config = of_problem(config, problem)
    if out is not None and config.init is not None and Path(config.init) == out.absolute():
        raise refuse("init", config.init, "is the directory to write to: choose another for one")
    with contextlib.ExitStack() as stack:
        place = None
        if out is not None and is_first():
            made = _made(config, problem)
            stack.enter_context(new_directory(out, overwrite))
            begin(out, made, None, arrays)  # whatever a kill leaves is now known to be a run's
            training = _training(config, problem, arrays, callbacks, elsewhere)
            start = None if branch is None else branched(training, branch, out, made)
            place = Place(out, made, config.recording, start, _about(config))
        return conduct(_training(config, problem, arrays, callbacks, elsewhere), place)


def run_or_resume(
    config: RunConfig,
    out: Path,
    *,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
    branch: Path | None = None,
    anyway: bool = False,
    elsewhere: Elsewhere | None = None,
) -> Fit:
    """As configured, in `out`: what lies there of this run is not done again.

    A run of other settings is refused; one of fewer rounds is given the rest.
    branch, anyway, elsewhere: as in `run` and `resume`.
    """
    if not run_directory.is_run(out):
        return run(
            config, out, callbacks=callbacks, problem=problem, branch=branch, elsewhere=elsewhere
        )
    config = resolve(config)
    problem = task_named(config.task).load(config.task_options) if problem is None else problem
    config = of_problem(config, problem)
    return _go_on(config, out, problem, callbacks, anyway, branch, elsewhere)


def check_goes_on(config: RunConfig, out: Path, problem: Problem) -> None:
    """Refuse what `run_or_resume` would refuse of the settings of a run that lies there."""
    if not run_directory.is_run(out):
        return
    settings, _ = run_directory.read_config(out)
    check_settings(out, settings, as_table(of_problem(resolve(config), problem)))
    summary = run_directory.read_summary(out)
    if summary is not None and summary["round"] > config.rounds:
        raise refuse("rounds", config.rounds, f"{str(out)!r} has done {summary['round']} already")


def resume(
    directory: str | Path,
    *,
    rounds: int | None = None,
    anyway: bool = False,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
) -> Fit:
    """Go on with a run where its last checkpoint is; the result is that of an uninterrupted one.

    rounds: how many it shall have in all, if not as many as it was to have.
    anyway: go on although versions or data are not what they were.
    A finished run is given back, and nothing is changed.
    """
    out = Path(directory)
    config = resumed_config(out, rounds)
    problem = task_named(config.task).load(config.task_options) if problem is None else problem
    return _go_on(of_problem(config, problem), out, problem, callbacks, anyway)


def _go_on(
    config: RunConfig,
    out: Path,
    problem: Problem,
    callbacks: Sequence[Callback],
    anyway: bool,
    branch: Path | None = None,
    elsewhere: Elsewhere | None = None,
) -> Fit:
    check_callbacks(callbacks)
    made, arrays = _made(config, problem), _initial(config, out)
    training = _training(config, problem, arrays, callbacks, elsewhere)
    about = _about(config)
    return go_on(training, out, made, config.recording, about, anyway, arrays, branch)


def resumed_config(out: Path, rounds: int | None) -> RunConfig:
    """The configuration of the run that lies there, for so many rounds."""
    settings, _ = run_directory.read_config(out)
    if "task" not in settings:
        raise FedpaError(
            f"{str(out)!r} was made by fedpa.fit: the same call, with out={str(out)!r}, resumes it"
        )
    config = resolve(read_toml(out / run_directory.CONFIG))
    if rounds is not None:
        config = resolve(dataclasses.replace(config, rounds=rounds))
    summary = run_directory.read_summary(out)
    if summary is not None and config.rounds < summary["round"] and not summary["stopped"]:
        raise refuse("rounds", config.rounds, f"{str(out)!r} has done {summary['round']} already")
    return config


def load_model(out: Path) -> tuple[RunConfig, Problem, Any]:
    """Configuration, problem and an untrained model of the run in `out`, for `fedpa.load`."""
    config = resolve(read_toml(out / run_directory.CONFIG))
    problem = task_named(config.task).load(config.task_options)
    return config, problem, problem.init(jax.random.key(config.seed))


def check_run(config: RunConfig, problem: Problem) -> dict[str, np.ndarray] | None:
    """Refuse what the task's data and model don't have; the arrays of a warm start, if it is one.

    Nothing is compiled for it, and nothing made.
    """
    asked = {
        "stop_metric": config.stopping.stop_metric,
        "target_metric": config.stopping.target_metric,
    }
    for field, name in asked.items():
        if name is not None:
            known = reported(problem, task_named(config.task).metric, config.task_options)
            if name not in known:
                expected = f"rounds of task {config.task} don't report it, but {', '.join(known)}"
                raise refuse(field, name, expected)
    arrays = _initial(config, None)
    if arrays is not None:
        shapes = eqx.filter_eval_shape(problem.init, jax.random.key(config.seed))
        parameter_files.check_fits(shapes, arrays, f"init = {config.init!r}")
    return arrays


def of_problem(config: RunConfig, problem: Problem) -> RunConfig:
    """Which of the task's data sets it was is part of what decides the numbers."""
    options = dataclasses.replace(config.task_options, dataset=problem.dataset)
    return dataclasses.replace(config, task_options=options)


def _made(config: RunConfig, problem: Problem) -> Made:
    splits = {
        "train": problem.clients,
        "validation": problem.validation,
        "test": problem.test,
    }
    return Made(as_table(config), environment(made_by=__name__, data=data_fingerprint(splits)))


def _about(config: RunConfig) -> dict[str, Any]:
    return {
        "task": config.task,
        "method": config.method,
        "label": label_method(config.method, config.hyperparameters),
        "seed": config.seed,
    }


def _initial(config: RunConfig, out: Path | None) -> Any:
    """The arrays of a warm start: those given, or those that the run took note of."""
    if config.init is None:
        return None
    if out is not None and (out / run_directory.INIT).is_file():
        return read_npz(out / run_directory.INIT)
    return parameter_files.initial(config.init, config.init_round)


def _training(
    config: RunConfig,
    problem: Problem,
    arrays: Any,
    callbacks: Sequence[Callback],
    elsewhere: Elsewhere | None = None,
) -> Training:
    task = task_named(config.task)
    options = config.task_options
    named = METHODS[config.method]
    clients, clients_per_round = problem.clients, config.clients_per_round
    if named.pooled:
        clients, clients_per_round = pooled(clients, clients_per_round, config.seed), 1
    engine = engines()[config.engine](config.engine_options)  # first: what is compiled is kept
    params = problem.init(jax.random.key(config.seed))
    if arrays is not None:
        params = parameter_files.warmed(params, arrays, f"init = {config.init!r}")
    method = named.build(config.hyperparameters)
    algorithm, theta, assemble = prepared_task(problem, params, clients, method, config.rounds)
    if elsewhere is not None:
        algorithm, engine = elsewhere(algorithm, theta)
    measure = task_evaluation(problem, task.metric, options)
    best = Best(f"{'eval' if problem.validation is None else 'valid'}/{task.metric}")
    remembering = remember_best(best)

    def at_end(model: Any, record: dict[str, Any]) -> dict[str, Any]:
        last = {} if f"eval/{task.metric}" in record else measure(model)
        if not config.test_at_end:
            return last
        return last | on_all_of_test(problem, task.metric, options, model, record | last)

    return Training(
        algorithm,
        theta,
        clients,
        assemble,
        config.rounds,
        clients_per_round,
        config.seed,
        engine,
        config.min_success,
        [
            at_rounds(measure, config.eval_every),
            remembering,
            *stops(config.stopping, best, f"eval/{task.metric}"),
            *callbacks,
        ],
        remembering,
        at_end,
    )
