"""One run of a task from its configuration, written to a directory."""

from collections.abc import Sequence
from pathlib import Path

import jax

from fedpa.algorithms.method import methods
from fedpa.engines import EngineOptions, engines
from fedpa.tasks.task import task_named
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.config import RunConfig, resolve
from fedpa.training.fit import fit
from fedpa.training.loop import Fit


def run(
    config: RunConfig,
    out: Path,
    *,
    overwrite: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Fit:
    """Train, writing `config.toml`, `metrics.jsonl` and `params.npz` to `out`."""
    config = resolve(config)
    run_directory.check_free(out, overwrite)
    problem = task_named(config.task).load()
    method = methods()[config.method].build(config.hyperparameters)
    params = problem.init(jax.random.key(config.seed))
    run_directory.create(out, config, overwrite)
    with run_directory.metrics_file(out) as log:
        result = fit(
            problem.loss,
            params,
            problem.clients,
            method,
            rounds=config.rounds,
            clients_per_round=config.clients_per_round,
            seed=config.seed,
            regularizer=problem.regularizer,
            reduction=problem.reduction,
            evaluate=problem.evaluate,
            eval_every=config.eval_every,
            callbacks=[log, *callbacks],
            engine=engines()[config.engine](EngineOptions()),
        )
    run_directory.save_params(out, result.params)
    return result
