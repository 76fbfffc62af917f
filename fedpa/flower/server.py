"""The ServerApp: `fedpa`'s round loop over the nodes of a Flower deployment.

Cohorts, checkpoints, early stopping and what is rejected are as in `fedpa.fit`; the directory is a
run's like any other. If it is cut off, the same `flwr run` resumes it from its last checkpoint.
"""

import contextlib
import functools
import json
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.methods import Method, OfPopulation, about
from fedpa.atomic_write import write_atomically
from fedpa.data.federated import FederatedData
from fedpa.engines.engine import Engine, OfAlgorithm, RoundResult
from fedpa.errors import FedpaError
from fedpa.flower import wire
from fedpa.flower.client import example_shapes, make_node, message_shapes
from fedpa.flower.engine import RunFacts, flower, with_tokens
from fedpa.flower.roster import Roster
from fedpa.flower.settings import Connection, read_connection
from fedpa.metrics.streaming import make_evaluator
from fedpa.server.aggregation import total_weight
from fedpa.training.callbacks import Callback, Event
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.fit import fit
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem
from fedpa.training.run_directory import CLIENTS, fresh_directory, is_run, past
from fedpa.types import Params

Train = Callable[[Problem, OfAlgorithm, Path, Sequence[Callback]], Fit]
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


def make_run(
    problem: Problem,
    method: Method,
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
    weighting: str | None = None,
    **options: Any,
) -> Served:
    """A run of a problem and a method of your own, recorded as `fedpa.fit` does.

    Args:
        problem: Its clients are any that have the shapes of the nodes' data; its model is drawn
            from `seed`; `problem.metric` is evaluated on `problem.test`.
        method: As on the nodes, e.g. `fedpa.fedpa(local, server, rho=0.1)`.
        rounds, clients_per_round, seed: As in `fedpa.fit`.
        weighting: q_i, "examples" or "uniform"; default: the method's.
        options: More of `fedpa.fit`'s: eval_every, min_success, best, recording, callbacks.

    Example:
        >>> def load(settings):
        ...     return make_run(problem, method, rounds=settings["rounds"], clients_per_round=10)
        >>> app = server_app(load)
    """
    if weighting is None:
        known = about(method)
        weighting = "examples" if known is None else known.settings().get("weighting", "examples")
    evaluate = make_evaluator(problem.metric, problem.test, problem.eval_batch_size)
    more = options.pop("callbacks", ())

    def train(
        problem: Problem, engine: OfAlgorithm, out: Path, callbacks: Sequence[Callback]
    ) -> Fit:
        return fit(
            problem.loss,
            problem.init(jax.random.key(seed)),
            problem.clients,
            method,
            rounds=rounds,
            clients_per_round=clients_per_round,
            seed=seed,
            regularizer=problem.regularizer,
            reduction=problem.reduction,
            sparse=problem.sparse,
            weight=problem.weight,
            evaluate=lambda params: evaluate(params).values,
            callbacks=[*more, *callbacks],
            engine=engine,
            out=out,
            progress=False,
            **options,
        )

    return Served(problem, method, train, weighting)


def server_app(load: Callable[[Mapping[str, Any]], Served]) -> ServerApp:
    """An app that runs `fedpa`'s round loop over the nodes.

    Args:
        load: The run's settings → the run, from `make_run(problem, method, …)`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            connection = read_connection(context.run_config)
            serve(grid, connection, load(context.run_config))
        except FedpaError as error:  # what is refused is a line, not a page of where
            raise error.with_traceback(None) from None

    return app


def serve(grid: Grid, connection: Connection, served: Served) -> Fit:
    """Start or resume a run on the nodes of the grid."""
    problem = served.problem
    with warnings.catch_warnings(), _without_propagation():
        warnings.showwarning = _log_ours(warnings.showwarning)
        out = Path(connection.out) if connection.out else fresh_directory(served.name)
        example = example_shapes(problem.clients)
        roster = Roster(grid, connection, _describe_message(served), wire.describe_example(example))
        roster.wait_to_start()
        for reason in roster.twice.values():  # the first to answer would be chosen
            raise FedpaError(reason)
        start = read_start(out) or RunStart(secrets.token_hex(8), roster.sizes())
        facts = RunFacts(
            example,
            served.weighting,
            _population(served.method, start.clients),
            start.run,
            lambda t: (list_checkpoints(out)[-2:] or [t])[0],
        )

        def connect(algorithm: Algorithm, theta: Params) -> tuple[Algorithm, Engine]:
            engine = flower(algorithm, theta, roster, facts)

            @functools.wraps(engine)
            def run(*given: Any) -> RoundResult:
                if read_start(out) is None:  # not before the run is known to continue here
                    write_atomically(out / CLIENTS, json.dumps(start._asdict()).encode())
                return engine(*given)

            return with_tokens(algorithm, theta), run

        where = f"{len(start.clients)} clients on {len(roster.sites)} nodes"
        log(INFO, "fedpa: %s; run directory %s", where, out.absolute())
        done = len(past(out)) if is_run(out) else 0
        if done:
            log(INFO, "fedpa: resumes the run in that directory after round %d", done)
        with_nodes = problem._replace(clients=_remote_data(start.clients, example))
        result = served.train(with_nodes, OfAlgorithm(connect), out, [_log_round])
    nothing = " (all of them before: nothing was to do)" if done == len(result.history) else ""
    log(INFO, "fedpa: done, after round %d%s", len(result.history), nothing)
    return result


def _log_ours(others: Callable[..., None]) -> Callable[..., None]:
    """Our warnings into the log; libraries' own (of forks, of overflows) where they belong."""

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category is UserWarning:
            log(WARNING, "fedpa: %s", message)
        else:
            others(message, category, *where)

    return show


@contextlib.contextmanager
def _without_propagation() -> Iterator[None]:
    """Other libraries' handlers of the root logger would write every line again."""
    logger = getLogger("flwr")
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.propagate = before


class RunStart(NamedTuple):
    """What a run began with, and has when it is resumed, whichever nodes are connected then."""

    run: str
    """Its name on the nodes."""
    clients: Mapping[str, int]
    """Those of its cohorts, and their numbers of examples."""


def read_start(out: Path) -> RunStart | None:
    """None if the directory contains no run over a network."""
    if not is_run(out) or not (out / CLIENTS).is_file():
        return None
    try:
        found = json.loads((out / CLIENTS).read_text("utf-8"))
        sizes = {str(name): int(n) for name, n in found["clients"].items()}
        return RunStart(str(found["run"]), sizes)
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise FedpaError(f"{str(out / CLIENTS)!r} can't be read: {error!r}") from None


def _remote_data(sizes: Mapping[str, int], example: Any) -> FederatedData:
    """A federation of which ids, sizes and shapes are known; examples are zeros here."""

    def examples(name: str) -> Any:
        return jax.tree.map(lambda x: np.zeros((min(sizes[name], 1), *x.shape), x.dtype), example)

    return FederatedData(sorted(sizes), sizes.__getitem__, examples)


def _describe_message(served: Served) -> dict[str, str]:
    """What nodes compare with what they would expect to be sent."""
    node = make_node(served.problem, served.method, 1.0)
    return wire.describe_arrays(message_shapes(node.algorithm, node.theta))


def _population(method: Method, sizes: Mapping[str, int]) -> float:
    """Σ q_i of all clients; 1, as in queries, where the method does not ask for it."""
    if not isinstance(method, OfPopulation):
        return 1.0
    return total_weight(method.weighting, sizes.values())


SHOWN = ("train/loss", "eval/loss", "eval/accuracy", "eval/recall_at_5", "train/rejected")


def _log_round(event: Event) -> None:
    """A line for every round."""
    record = event.record
    values = "  ".join(f"{key} {record[key]:.4g}" for key in SHOWN if key in record)
    done, phase = f"{event.round}/{event.rounds}", record["phase"]
    log(INFO, "fedpa: round %s  %s  %s  %.1f s", done, phase, values, record["seconds"])
