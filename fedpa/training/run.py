"""One run of a task from its configuration, written to a directory."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import jax

from fedpa.algorithms.method import methods
from fedpa.data.pooled import pooled
from fedpa.engines import engines
from fedpa.tasks.task import task_named
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.config import RunConfig, resolve
from fedpa.training.evaluation import task_evaluation
from fedpa.training.fit import fit
from fedpa.training.loop import Fit


def run(
    config: RunConfig,
    out: Path | None,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Train, writing `config.toml`, `metrics.jsonl` and `params.npz` to `out`, if there is one."""
    config = resolve(config)
    if out is not None:
        run_directory.check_free(out, overwrite)
    task = task_named(config.task)
    problem = task.load(config.task_options)
    evaluations = task_evaluation(problem, task.metric, config.task_options, config.eval_every)
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
            callbacks=[*evaluations, *callbacks],
            engine=engine,
            min_success=config.min_success,
        )
    if out is not None:
        run_directory.save_params(out, result.params)
    return result
