"""One run of a task from its configuration, written to a directory."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from fedpa.algorithms.method import methods
from fedpa.data.pooled import pooled
from fedpa.engines import engines
from fedpa.tasks.task import Problem, task_named
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.config import RunConfig, resolve
from fedpa.training.evaluation import on_all_of_test, task_evaluation
from fedpa.training.fit import fit
from fedpa.training.loop import Fit


def run(
    config: RunConfig,
    out: Path | None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
    problem: Problem | None = None,
) -> Fit:
    """Train, writing `config.toml`, `metrics.jsonl` and `params.npz` to `out`, if there is one.

    problem: the task, if it is loaded already.
    """
    config = resolve(config)
    if out is not None:
        run_directory.check_free(out, overwrite)
    task = task_named(config.task)
    problem = task.load(config.task_options) if problem is None else problem
    # Which of the task's data sets it was is part of what decides the numbers.
    options = dataclasses.replace(config.task_options, dataset=problem.dataset)
    config = dataclasses.replace(config, task_options=options)
    evaluation = task_evaluation(problem, task.metric, options, config.eval_every)
    named = methods()[config.method]
    method = named.build(config.hyperparameters)
    clients, clients_per_round = problem.clients, config.clients_per_round
    if named.pooled:
        clients, clients_per_round = pooled(clients, clients_per_round, config.seed), 1
    engine = engines()[config.engine](config.engine_options)  # first: what is compiled is kept
    params = problem.init(jax.random.key(config.seed))
    with contextlib.ExitStack() as stack:
        if out is not None:
            run_directory.create(out, config, overwrite)
            callbacks = [stack.enter_context(run_directory.metrics_file(out)), *callbacks]
        result = fit(
            problem.loss,
            params,
            clients,
            method,
            rounds=config.rounds,
            clients_per_round=clients_per_round,
            seed=config.seed,
            regularizer=problem.regularizer,
            reduction=problem.reduction,
            sparse=problem.sparse,
            weight=problem.weight,
            callbacks=[evaluation, *callbacks],
            engine=engine,
            min_success=config.min_success,
        )
    if out is not None:
        run_directory.save_params(out, result.params)
    # The last, so that a broken test split costs nothing but itself.
    last = result.history[-1]
    last |= on_all_of_test(problem, task.metric, options, result.params, last)
    if out is not None:
        run_directory.replace_last_record(out, last)
    return result
