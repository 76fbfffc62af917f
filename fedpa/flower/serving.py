"""The ServerApp: `fedpa`'s round loop over the nodes of a Flower deployment.

Cohorts, checkpoints, early stopping and what is rejected are as in `fedpa run`; the directory is a
run's like any other. Cut down, the same `flwr run` goes on from its last checkpoint.
"""

import contextlib
import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm, OfPopulation
from fedpa.engines.engine import Engine, RoundResult
from fedpa.errors import FedpaError
from fedpa.experiments.config import RunConfig
from fedpa.experiments.methods import METHODS
from fedpa.experiments.run import run_or_resume
from fedpa.experiments.tasks.task import Problem, task_named
from fedpa.flower.engine import Told, flower, with_tokens
from fedpa.flower.examples_kind import as_text, remote
from fedpa.flower.node import example_shapes, message_shapes
from fedpa.flower.records import shapes
from fedpa.flower.roster import Roster
from fedpa.flower.settings import run_settings
from fedpa.server.weighting import total_weight
from fedpa.training import checkpoints
from fedpa.training.callbacks import Event
from fedpa.training.fit import prepared_task
from fedpa.training.loop import Fit
from fedpa.training.run_directory import CLIENTS, fresh_directory, is_run, past
from fedpa.training.whole_files import write_atomically
from fedpa.types import Params


def server_app() -> ServerApp:
    """An app for the tasks and methods of `fedpa`, chosen by the run's settings."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(grid, context.run_config)
        except FedpaError as error:  # what is refused is a line, not a page of where
            raise error.with_traceback(None) from None

    return app


def serve(grid: Grid, settings: Mapping[str, Any]) -> Fit:
    """Run, or go on with, the run that the settings describe, on the nodes of the grid."""
    config, connection = run_settings(settings)
    with warnings.catch_warnings(), _said_once():
        warnings.showwarning = _warned(warnings.showwarning)
        problem = task_named(config.task).load(config.task_options)
        out = Path(connection.out) if connection.out else fresh_directory(config.task)
        kind = example_shapes(problem.clients)
        roster = Roster(grid, connection, _message_shapes(config, problem), as_text(kind))
        roster.wait_to_start()
        for reason in roster.twice.values():  # whoever answers first would be it
            raise FedpaError(reason)
        known = begun(out) or Begun(secrets.token_hex(8), roster.sizes())
        sizes = known.clients
        told = Told(
            kind,
            config.hyperparameters.weighting,
            _population(config, sizes),
            known.run,
            lambda t: (checkpoints.entries(out)[-2:] or [t])[0],
        )

        def elsewhere(algorithm: Algorithm, theta: Params) -> tuple[Algorithm, Engine]:
            engine = flower(algorithm, theta, roster, told)

            def noting(*given: Any) -> RoundResult:
                if begun(out) is None:  # not before the run is known to go on here
                    write_atomically(out / CLIENTS, json.dumps(known._asdict()).encode())
                return engine(*given)

            return with_tokens(algorithm, theta), noting

        where = f"{len(sizes)} clients on {len(roster.sites)} nodes; run directory {out.absolute()}"
        log(INFO, "fedpa: %s", where)
        done = len(past(out)) if is_run(out) else 0
        if done:
            log(INFO, "fedpa: goes on after round %d of the run that lies there", done)
        fit = run_or_resume(
            config,
            out,
            callbacks=[_shown],
            problem=problem._replace(clients=remote(sizes, kind)),
            elsewhere=elsewhere,
        )
    nothing = " (all of them before: nothing was to do)" if done == len(fit.history) else ""
    log(INFO, "fedpa: done, after round %d of %d%s", len(fit.history), config.rounds, nothing)
    return fit


def _warned(others: Callable[..., None]) -> Callable[..., None]:
    """Our warnings into the log; libraries' own (of forks, of overflows) where they belong."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category is UserWarning:
            log(WARNING, "fedpa: %s", message)
        else:
            others(message, category, *where)

    return show


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Other libraries' handlers of the root logger would say it all again."""
    logger = getLogger("flwr")
    kept, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = kept


class Begun(NamedTuple):
    """What a run began with, and goes on with, whoever is there then."""

    run: str
    """By which nodes know it again."""
    clients: Mapping[str, int]
    """Those of its cohorts, and their numbers of examples."""


def begun(out: Path) -> Begun | None:
    """None of a directory where no run over a network has begun."""
    if not is_run(out) or not (out / CLIENTS).is_file():
        return None
    try:
        found = json.loads((out / CLIENTS).read_text("utf-8"))
        sizes = {str(name): int(n) for name, n in found["clients"].items()}
        return Begun(str(found["run"]), sizes)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise FedpaError(f"{str(out / CLIENTS)!r} can't be read: {error!r}") from None


def _message_shapes(config: RunConfig, problem: Problem) -> dict[str, str]:
    """What nodes compare with what they would expect to be sent."""
    method = METHODS[config.method].build(config.hyperparameters)
    if isinstance(method, OfPopulation):
        method = method.method(1.0)
    params = problem.init(jax.random.key(config.seed))
    algorithm, theta, _ = prepared_task(problem, params, problem.clients, method, config.rounds)
    return shapes(message_shapes(algorithm, theta, next(iter(algorithm.clients))))


def _population(config: RunConfig, sizes: Mapping[str, int]) -> float:
    """Σ q_i of all clients, where the method asks for it."""
    method = METHODS[config.method].build(config.hyperparameters)
    if not isinstance(method, OfPopulation):
        return 0.0
    return total_weight(method.weighting, sizes.values())


SHOWN = ("train/loss", "eval/loss", "eval/accuracy", "eval/recall_at_5", "train/rejected")


def _shown(event: Event) -> None:
    """A line for every round."""
    record = event.record
    values = "  ".join(f"{key} {record[key]:.4g}" for key in SHOWN if key in record)
    log(
        INFO,
        "fedpa: round %d/%d  %s  %s  %.1f s",
        event.round,
        event.rounds,
        record["phase"],
        values,
        record["seconds"],
    )
