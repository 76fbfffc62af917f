"""One run of a task from its configuration, recorded in a directory, resumable."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.readers.npz import read_npz
from fedpa.data.views import pool_clients
from fedpa.engines import ENGINES
from fedpa.engines.distributed import is_first
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, refuse
from fedpa.experiments.config import (
    RunConfig,
    StoppingOptions,
    as_table,
    build_run_method,
    label_run,
    read_toml,
    resolve,
)
from fedpa.experiments.evaluation import add_metrics, evaluate_task, evaluate_test, list_metrics
from fedpa.experiments.hyperparameters import PLATEAU_METRIC, replace_fields
from fedpa.experiments.methods import METHODS
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.objectives.prior import normal_prior
from fedpa.training import run_directory
from fedpa.training.callbacks import Best, Callback, check_callbacks, early_stopping, stop_at
from fedpa.training.loading import read_initial
from fedpa.training.loop import Fit
from fedpa.training.named_arrays import check_fits, fill_model
from fedpa.training.problem import Prepared, Problem, prepare, split_params
from fedpa.training.provenance import data_fingerprint, environment
from fedpa.training.run import (
    Place,
    Remedies,
    Training,
    check_settings,
    connect_engine,
    resume_run,
    start_run,
    train_run,
)
from fedpa.training.run_directory import read_run

REMEDIES = Remedies("--force, or fedpa.resume(…, force=True),", "--overwrite")


def run(
    config: RunConfig,
    out: Path | None,
    *,
    overwrite: bool = False,
    resuming: bool = False,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
    branch: Path | None = None,
    elsewhere: OfAlgorithm | None = None,
) -> Fit:
    """Train as configured.

    Args:
        config: The run's settings.
        out: The directory that records it; default: none.
        overwrite: Replace a run that the directory contains.
        resuming: Resume a run that it contains: of the same settings, or of fewer rounds.
        force: Resume although versions or data have changed.
        callbacks: Called after every round.
        problem: The task, if it is already loaded.
        branch: A run that equals this one's first rounds: this run starts from its end.
        elsewhere: The engine, if it is not one of those that the configuration can name.
    """
    config = resolve(config)
    check_callbacks(callbacks)
    is_recorded = resuming and out is not None and (out / run_directory.CONFIG).is_file()
    recorded = out if is_recorded else None
    if out is not None and recorded is None:
        if is_first():
            run_directory.check_free(out, overwrite, REMEDIES.overwrite)
        if config.init is not None and Path(config.init) == out.absolute():
            raise refuse("init", config.init, "is the directory to write to: choose another")
    problem = task_named(config.task).load(config.task_options) if problem is None else problem
    arrays = check_run(config, problem, recorded)
    config = set_dataset(config, problem)
    training = assemble_run(config, problem, arrays, callbacks, elsewhere)
    if out is None:
        return train_run(training, None)
    splits = {"train": problem.clients, "validation": problem.validation, "test": problem.test}
    made_of = environment(made_by=__name__, data=data_fingerprint(splits))
    about = {
        "task": config.task,
        "method": config.method,
        "label": training.label,
        "seed": config.seed,
    }
    place = Place(out, as_table(config), made_of, config.recording, about, arrays, branch, REMEDIES)
    if recorded is not None:
        return resume_run(training, place, force)
    return start_run(training, place, overwrite)


def check_resumable(config: RunConfig, out: Path, problem: Problem) -> None:
    """Refuse other settings than those of the run in `out`, if it contains one."""
    if not run_directory.is_run(out):
        return
    recorded = read_run(out)
    settings = as_table(set_dataset(resolve(config), problem))
    check_settings(out, recorded.settings, settings, REMEDIES.overwrite)
    summary = recorded.summary
    if summary is not None and summary["round"] > config.rounds:
        raise refuse("rounds", config.rounds, f"{str(out)!r} already has {summary['round']} rounds")


def resume(
    directory: str | Path,
    *,
    rounds: int | None = None,
    force: bool = False,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
) -> Fit:
    """Resume a run from its last checkpoint; the result equals that of an uninterrupted run.

    rounds: the total number of rounds, if it changes.
    force: resume although versions or data have changed.
    A finished run is returned unchanged.
    """
    out = Path(directory)
    config = read_resumed_config(out, rounds)
    return run(config, out, resuming=True, force=force, callbacks=callbacks, problem=problem)


def read_resumed_config(out: Path, rounds: int | None) -> RunConfig:
    """The configuration of the run in `out`, for `rounds` rounds if given."""
    recorded = read_run(out)
    if "task" not in recorded.settings:
        raise FedpaError(
            f"{str(out)!r} was made by fedpa.fit: in Python, "
            f"fedpa.resume({str(out)!r}, loss, params, clients, method) resumes it"
        )
    config = resolve(read_toml(out / run_directory.CONFIG))
    if rounds is not None:
        config = resolve(dataclasses.replace(config, rounds=rounds))
    summary = recorded.summary
    if summary is not None and config.rounds < summary["round"] and not summary["stopped"]:
        raise refuse("rounds", config.rounds, f"{str(out)!r} already has {summary['round']} rounds")
    return config


def load_model(out: Path) -> tuple[RunConfig, Problem, Any]:
    """Configuration, problem and an untrained model of the run in `out`, for `fedpa.load`."""
    config = resolve(read_toml(out / run_directory.CONFIG))
    problem = task_named(config.task).load(config.task_options)
    return config, problem, problem.init(jax.random.key(config.seed))


def check_run(
    config: RunConfig, problem: Problem, recorded: Path | None = None
) -> dict[str, np.ndarray] | None:
    """Check settings against the task's data and model, without compiling or writing anything.

    Args:
        config: The run's settings.
        problem: The task.
        recorded: A directory that contains the run, and its warm start.
    Returns:
        The arrays of a warm start, or None.
    """
    add_metrics(problem, config.task_options.metrics)  # refuses metrics that the task has not
    stopping, plateau_metric = config.stopping, config.hyperparameters.plateau_metric
    for field, name, others in (
        ("stop_metric", stopping.stop_metric, []),
        ("target_metric", stopping.target_metric, []),
        ("plateau_metric", plateau_metric, [PLATEAU_METRIC]),
    ):
        if name is not None:
            metrics = list_metrics(problem, task_named(config.task).metric, config.task_options)
            known = [*others, *metrics]
            if name not in known:
                expected = f"rounds of task {config.task} don't report it, but {', '.join(known)}"
                raise refuse(field, name, expected)
    if config.init is None:
        return None
    if recorded is not None and (recorded / run_directory.INIT).is_file():
        return read_npz(recorded / run_directory.INIT)
    arrays = read_initial(config.init, config.init_round)
    shapes = eqx.filter_eval_shape(problem.init, jax.random.key(config.seed))
    check_fits(shapes, arrays, f"init = {config.init!r}")
    return arrays


def set_dataset(config: RunConfig, problem: Problem) -> RunConfig:
    """Add the name of the task's data set, which affects the numbers."""
    return replace_fields(config, dataset=problem.dataset)


def set_prior(problem: Problem, options: TaskOptions) -> Problem:
    """The problem with the prior that the options ask for."""
    if options.prior_sd is None:
        return problem
    if problem.prior is not None:
        raise refuse("prior_sd", options.prior_sd, "the task has a prior of its own: leave it out")
    return problem._replace(prior=normal_prior(sd=options.prior_sd))


def assemble_run(
    config: RunConfig,
    problem: Problem,
    arrays: Mapping[str, np.ndarray] | None = None,
    callbacks: Sequence[Callback] = (),
    elsewhere: OfAlgorithm | None = None,
) -> Training:
    """Assemble the training; `arrays` of a warm start, others as in `run`."""
    task = task_named(config.task)
    options = config.task_options
    clients, clients_per_round = problem.clients, config.clients_per_round
    if METHODS[config.method].pooled:
        clients, clients_per_round = pool_clients(clients, clients_per_round, config.seed), 1
    params = problem.init(jax.random.key(config.seed))
    if arrays is not None:
        params = fill_model(params, arrays, f"init = {config.init!r}")
    built = _build_method(config, problem, clients, params, elsewhere)
    best = Best(f"{'eval' if problem.validation is None else 'valid'}/{task.metric}")

    def test(model: Any, record: dict[str, Any]) -> dict[str, Any]:
        return evaluate_test(problem, task.metric, options, model, record)

    return Training(
        built.prepared,
        clients,
        built.engine,
        config.rounds,
        clients_per_round,
        config.seed,
        config.min_success,
        built.evaluate,
        config.eval_every,
        [*_make_stops(config.stopping, best, f"eval/{task.metric}"), *callbacks],
        best,
        test if config.test_at_end else None,
        label_run(config),
    )


class _Built(NamedTuple):
    """A method built for a task: what runs that differ only in their seed compile once."""

    prepared: Prepared
    engine: Engine
    evaluate: Callable[[Any], dict[str, float]]
    problem: Problem
    settings: tuple[Any, ...]
    rest: Any
    """The parts of the model that are not trained."""


_latest: list[_Built] = []
"""The method built last, if any."""


def _build_method(
    config: RunConfig,
    problem: Problem,
    clients: FederatedData,
    params: Any,
    elsewhere: OfAlgorithm | None,
) -> _Built:
    """Build the method, its engine and the evaluation; the latest ones are used again if they fit.

    They fit a run that has the same settings except for the seed.
    """
    named, options = METHODS[config.method], config.task_options
    settings = (
        *(config.task, options, config.method, config.hyperparameters, config.rounds),
        config.privacy,
        *(config.engine, config.engine_options),
    )
    rest = eqx.filter(params, eqx.is_inexact_array, inverse=True)
    can_share = elsewhere is None and not named.pooled
    for built in _latest if can_share else ():
        is_same = built.problem is problem and built.settings == settings
        if is_same and eqx.tree_equal(built.rest, rest):
            theta, assemble = split_params(params)
            same = built.prepared._replace(theta=theta, assemble=assemble)
            return built._replace(prepared=same)
    engine = ENGINES[config.engine](config.engine_options)  # first: what is compiled is kept
    objective = set_prior(problem, options).objective
    method = build_run_method(config)
    prepared, engine = connect_engine(
        engine if elsewhere is None else elsewhere,
        prepare(objective, params, clients, method, config.rounds),
    )
    evaluate = evaluate_task(problem, task_named(config.task).metric, options)
    built = _Built(prepared, engine, evaluate, problem, settings, rest)
    if can_share:
        _latest[:] = [built]
    return built


def _make_stops(options: StoppingOptions, best: Best, shown: str) -> list[Callback]:
    """Make the callbacks that end a run; `shown` is the metric of the curves."""
    stops: list[Callback] = []
    if options.patience is not None:
        watched = options.stop_metric or best.metric
        stops.append(early_stopping(watched, options.patience, options.min_improvement))
    if options.target is not None:
        watched = options.target_metric or shown
        stops.append(stop_at(watched, options.target, options.target_window))
    return stops
