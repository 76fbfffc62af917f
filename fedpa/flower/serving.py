"""The ServerApp: `fedpa`'s round loop over the nodes of a Flower deployment.

Cohorts, checkpoints, early stopping and what is rejected are as in `fedpa run`; the directory is a
run's like any other. Cut down, the same `flwr run` goes on from its last checkpoint.
"""

import contextlib
import json
import secrets
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.methods import Method, OfPopulation
from fedpa.atomic_write import write_atomically
from fedpa.engines.engine import Engine, RoundResult
from fedpa.errors import FedpaError
from fedpa.flower.engine import Told, flower, with_tokens
from fedpa.flower.examples_kind import as_text, remote
from fedpa.flower.node import example_shapes, message_shapes
from fedpa.flower.records import shapes
from fedpa.flower.roster import Roster
from fedpa.flower.settings import Connection, connection_settings
from fedpa.server.weighting import total_weight
from fedpa.training.callbacks import Callback, Event
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem, prepare
from fedpa.training.run_directory import CLIENTS, fresh_directory, is_run, past
from fedpa.types import Params

Elsewhere = Callable[[Algorithm, Params], tuple[Algorithm, Engine]]
"""(algorithm, θ) → the algorithm as the server runs it, and the engine that reaches its clients."""
Train = Callable[[Problem, Elsewhere, Path, Sequence[Callback]], Fit]
"""(problem with the nodes' clients, where they run, run directory, callbacks) → the outcome."""


class Served(NamedTuple):
    """A run on a grid of nodes: what is trained, by which method, and how it is recorded."""

    problem: Problem
    method: Method
    train: Train
    weighting: str = "examples"
    """q_i, by which nodes' replies are checked."""
    name: str = "flower"
    """Of a fresh run directory."""


def server_app(load: Callable[[Mapping[str, Any]], Served]) -> ServerApp:
    """An app that runs `fedpa`'s round loop over the nodes; `load` reads the run's settings."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            connection = connection_settings(context.run_config)
            serve(grid, connection, load(context.run_config))
        except FedpaError as error:  # what is refused is a line, not a page of where
            raise error.with_traceback(None) from None

    return app


def serve(grid: Grid, connection: Connection, served: Served) -> Fit:
    """Start or resume a run on the nodes of the grid."""
    problem = served.problem
    with warnings.catch_warnings(), _said_once():
        warnings.showwarning = _warned(warnings.showwarning)
        out = Path(connection.out) if connection.out else fresh_directory(served.name)
        kind = example_shapes(problem.clients)
        roster = Roster(grid, connection, _message_shapes(served), as_text(kind))
        roster.wait_to_start()
        for reason in roster.twice.values():  # the first to answer would be chosen
            raise FedpaError(reason)
        known = begun(out) or Begun(secrets.token_hex(8), roster.sizes())
        sizes = known.clients
        told = Told(
            kind,
            served.weighting,
            _population(served.method, sizes),
            known.run,
            lambda t: (list_checkpoints(out)[-2:] or [t])[0],
        )

        def elsewhere(algorithm: Algorithm, theta: Params) -> tuple[Algorithm, Engine]:
            engine = flower(algorithm, theta, roster, told)

            def noting(*given: Any) -> RoundResult:
                if begun(out) is None:  # not before the run is known to continue here
                    write_atomically(out / CLIENTS, json.dumps(known._asdict()).encode())
                return engine(*given)

            return with_tokens(algorithm, theta), noting

        where = f"{len(sizes)} clients on {len(roster.sites)} nodes; run directory {out.absolute()}"
        log(INFO, "fedpa: %s", where)
        done = len(past(out)) if is_run(out) else 0
        if done:
            log(INFO, "fedpa: resumes the run in that directory after round %d", done)
        with_nodes = problem._replace(clients=remote(sizes, kind))
        fit = served.train(with_nodes, elsewhere, out, [_shown])
    nothing = " (all of them before: nothing was to do)" if done == len(fit.history) else ""
    log(INFO, "fedpa: done, after round %d%s", len(fit.history), nothing)
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


def _message_shapes(served: Served) -> dict[str, str]:
    """What nodes compare with what they would expect to be sent."""
    problem, method = served.problem, served.method
    if isinstance(method, OfPopulation):
        method = method.method(1.0)
    params = problem.init(jax.random.key(0))
    algorithm, theta, _ = prepare(problem.objective, params, problem.clients, method, sys.maxsize)
    return shapes(message_shapes(algorithm, theta, next(iter(algorithm.clients))))


def _population(method: Method, sizes: Mapping[str, int]) -> float:
    """Σ q_i of all clients, where the method asks for it."""
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
