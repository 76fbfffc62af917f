"""The ServerApp: `fedpa`'s round loop over the nodes of a Flower deployment.

Cohorts, checkpoints, early stopping and rejections are as in `fedpa.fit`, and the directory is an
ordinary run directory. If the run is interrupted, the same `flwr run` resumes it from its last
checkpoint.

The engine takes a client update, an aggregation, a message and a cohort, like every other, and
returns the aggregate. The update runs on the nodes: the engine sends its phase and the message once
to each node that has clients of the cohort, and merges their sums in the order of the clients' ids.
"""

import contextlib
import functools
import json
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from logging import INFO, WARNING, getLogger
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate, Message, Sent
from fedpa.algorithms.methods import Described, Method, count_population
from fedpa.atomic_write import write_atomically
from fedpa.data.federated import FederatedData
from fedpa.engines.engine import (
    Cohort,
    Engine,
    OfAlgorithm,
    Report,
    RoundResult,
    Traffic,
    collect_reports,
    raw_keys,
)
from fedpa.errors import FedpaError, NoUsableClientError, explain, refuse
from fedpa.flower import wire
from fedpa.flower.client import (
    INQUIRY,
    describe_node,
    example_shapes,
    list_updates,
    make_node,
    reply_shapes,
)
from fedpa.flower.roster import Connection, Roster, read_connection
from fedpa.metrics.streaming import make_evaluator
from fedpa.privacy.clipping import joint_norm
from fedpa.privacy.ledger import LEDGER, Ledger
from fedpa.server.aggregation import (
    Aggregation,
    Weighting,
    all_finite,
    check_cohort,
    sum_of_node,
    sum_on_node,
    total_weight,
)
from fedpa.training.callbacks import Callback, Event
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.fit import fit
from fedpa.training.history import is_count
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem
from fedpa.training.run import RecordingOptions
from fedpa.training.run_directory import CLIENTS, fresh_directory, is_run, past
from fedpa.types import Params

SHOWN = (
    *("train/loss", "eval/loss", "eval/accuracy", "eval/recall_at_5", "train/rejected"),
    "privacy/epsilon",
)
"""A round's numbers in the log."""
LOST = (
    "fedpa: round %d: %s has lost the states of %d of its clients (%r, …): %s "
    "(a state-dir in its --node-config would have kept them)"
)

CAPPED = (
    "fedpa: %d clients have more than %d examples, largest-ratio = %g times the median: they weigh "
    "as if they had so many"
)

Train = Callable[[Problem, OfAlgorithm, Path, Sequence[Callback]], Fit]
"""(problem with the nodes' clients, where they run, run directory, callbacks) → the outcome."""


class Served(NamedTuple):
    """A run on a grid of nodes: what is trained, by which method, and how it is recorded.

    Args:
        problem: What is trained; its clients have the shapes of the nodes' data.
        method: As on the nodes.
        train: Runs the rounds.
        weighting: q_i, by which nodes' replies are checked (default: "examples").
        name: Of a fresh run directory (default: "flower").
    Example:
        >>> app = server_app(lambda settings: Served(problem, method, train))  # by `make_run`
    """

    problem: Problem
    method: Method
    train: Train
    weighting: Weighting = "examples"
    name: str = "flower"


def make_run(
    problem: Problem,
    method: Method,
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
    weighting: Weighting | None = None,
    eval_every: int = 1,
    callbacks: Sequence[Callback] = (),
    min_success: float = 0.0,
    recording: RecordingOptions = RecordingOptions(),
) -> Served:
    """Make a run of your own problem and method, recorded as by `fedpa.fit`.

    `fedpa.load(out, params=model)` reads its model, and `fedpa.posterior.from_run(out, model)` the
    posterior that `fedpa.algorithms.ep()` and the like give.

    Args:
        problem: Its clients are any that have the shapes of the nodes' data; its model is drawn
            from `seed`; `problem.metric` is evaluated on `problem.test`.
        method: As on the nodes, e.g. `fedpa.fedpa(local, server, rho=0.1)`.
        rounds, clients_per_round, seed: As in `fedpa.fit`.
        weighting: q_i, "examples" or "uniform"; default: the method's.
        eval_every, callbacks, min_success, recording: As in `fedpa.fit`.
    Returns:
        The run, for `server_app`.
    Example:
        >>> def load(settings):
        ...     return make_run(problem, method, rounds=settings["rounds"], clients_per_round=10)
        >>> app = server_app(load)
    """
    if weighting is None:
        settings = method.settings() if isinstance(method, Described) else {}
        weighting = settings.get("weighting", "examples")
    evaluate = make_evaluator(problem.metric, problem.test, problem.eval_batch_size)

    def train(problem: Problem, engine: OfAlgorithm, out: Path, more: Sequence[Callback]) -> Fit:
        return fit(
            problem.objective,
            problem.init(jax.random.key(seed)),
            problem.clients,
            method,
            rounds=rounds,
            clients_per_round=clients_per_round,
            seed=seed,
            evaluate=lambda params: evaluate(params).values,
            eval_every=eval_every,
            callbacks=[*callbacks, *more],
            engine=engine,
            min_success=min_success,
            out=out,
            recording=recording,
            progress=False,
        )

    return Served(problem, method, train, weighting)


def server_app(load: Callable[[Mapping[str, Any]], Served]) -> ServerApp:
    """Make the app of the server, which runs `fedpa`'s round loop over the nodes.

    Args:
        load: The run's settings → the run, from `make_run(problem, method, …)`.
    Returns:
        Flower's app, for `flwr run`.
    Example:
        >>> app = server_app(
        ...     lambda settings: make_run(problem, method, rounds=100, clients_per_round=10)
        ... )
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            connection = read_connection(context.run_config)
            serve(grid, connection, load(context.run_config))
        except FedpaError as error:  # a refusal is one line, without a traceback
            raise error.with_traceback(None) from None

    return app


def serve(grid: Grid, connection: Connection, served: Served) -> Fit:
    """Start or resume a run on the nodes of the grid."""
    with _log_by_flower():
        out = Path(connection.out) if connection.out else fresh_directory(served.name)
        # What nodes compare with their own.
        arrays = describe_node(make_node(served.problem, served.method))
        roster = Roster(grid, connection, arrays)
        roster.wait(connection.min_nodes, f"min-nodes = {connection.min_nodes}, but")
        start = read_start(out) or RunStart(secrets.token_hex(8), roster.sizes())
        where = f"{len(start.clients)} clients on {len(roster.sites)} nodes"
        log(INFO, "fedpa: %s; run directory %s", where, out.absolute())
        done = len(past(out)) if is_run(out) else 0
        if done:
            log(INFO, "fedpa: resuming the run in that directory after round %d", done)
        remote = _remote_data(start.clients, example_shapes(served.problem.clients))
        connect = functools.partial(flower, roster, served, start, out)
        problem = served.problem._replace(clients=remote)
        result = served.train(problem, OfAlgorithm(connect), out, [_log_round])
    nothing = " (already finished, nothing to do)" if done == len(result.history) else ""
    log(INFO, "fedpa: done, after round %d%s", len(result.history), nothing)
    return result._replace(client_states={})  # they are on the nodes


@contextlib.contextmanager
def _log_by_flower() -> Iterator[None]:
    """Log warnings through Flower's logger, each line once."""
    logger, show_others = getLogger("flwr"), warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
        if category is UserWarning:
            log(WARNING, "fedpa: %s", message)
        else:  # libraries' own: of forks, of overflows
            show_others(message, category, *where)

    # Other libraries' handlers of the root logger would write every line again.
    before, logger.propagate = logger.propagate, False
    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        try:
            yield
        finally:
            logger.propagate = before


def _log_round(event: Event) -> None:
    """Log a line for every round."""
    record = event.record
    values = "  ".join(f"{key} {record[key]:.4g}" for key in SHOWN if key in record)
    done, phase = f"{event.round}/{event.rounds}", record["phase"]
    log(INFO, "fedpa: round %s  %s  %s  %.1f s", done, phase, values, record["seconds"])


class RunStart(NamedTuple):
    """A run's clients at its start, which it keeps when resumed, whichever nodes are connected."""

    run: str
    """Its name on the nodes."""
    clients: Mapping[str, int]
    """Its clients, and their numbers of examples."""


def read_start(out: Path) -> RunStart | None:
    """None if the directory contains no run over a network."""
    if not is_run(out) or not (out / CLIENTS).is_file():
        return None
    path = out / CLIENTS
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise FedpaError(f"{path} can't be read: {explain(error)}") from None
    except (ValueError, RecursionError) as error:
        raise FedpaError(f"{path} is truncated or not JSON: {error}") from None
    if not isinstance(found, dict):
        raise refuse(f"{path}: content", found, "must be an object, as written")
    run, sizes = found.get("run"), found.get("clients")
    if not isinstance(run, str) or not run.isalnum():  # it names a directory on the nodes
        raise refuse(f"{path}: run", run, "must be letters and digits, as written")
    if not isinstance(sizes, dict) or not sizes:
        raise refuse(f"{path}: clients", sizes, "must be an object of clients and sizes")
    for name, n in sizes.items():
        wire.check_client(f"{path}: ", name)
        if not is_count(n):
            raise refuse(f"{path}: examples of client {name!r}", n, "must be a whole number")
    return RunStart(run, sizes)


def _remote_data(sizes: Mapping[str, int], example: Any) -> FederatedData:
    """Make a federation of known ids, sizes and shapes; its examples are zeros."""

    def examples(name: str) -> Any:
        return jax.tree.map(lambda x: np.zeros((min(sizes[name], 1), *x.shape), x.dtype), example)

    return FederatedData(sorted(sizes), sizes.__getitem__, examples)


def flower(
    roster: Roster, served: Served, start: RunStart, out: Path, algorithm: Algorithm, theta: Params
) -> tuple[Algorithm, Engine]:
    """Adapt the algorithm for the round loop, and make the engine.

    Client states stay on the nodes: the loop stores only the round of each state.
    """
    keeps = bool(jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)))
    updates, example = list_updates(algorithm), example_shapes(served.problem.clients)
    aggregation = algorithm.aggregation
    check_cohort(aggregation, "min-nodes", roster.connection.min_nodes)
    as_sum = functools.partial(sum_of_node, aggregation)
    merge = jax.jit(lambda total, part: aggregation.merge(total, as_sum(part)))
    value, value_of = jax.jit(aggregation.value), jax.jit(sum_on_node(aggregation).value)
    finite = jax.jit(all_finite)
    norm_of = jax.jit(lambda mean: joint_norm(mean.delta if isinstance(mean, Sent) else mean))
    largest = find_largest(roster.connection, served, start.clients, algorithm)
    counts = {name: min(n, largest or n) for name, n in start.clients.items()}
    population = count_population(served.method, counts.values())
    num_examples = max(sum(counts.values()), 1)  # as the server's own objective has it
    release = deploy(algorithm, out).release
    is_possible = None if release is None else jax.jit(release.is_possible)
    gone: set[str] = set()
    """Clients that can't take part: they have lost a state that the method can't do without."""

    @functools.cache
    def expect(phase: str) -> tuple[Any, tuple[str, ...]]:
        on_node = algorithm._replace(aggregation=sum_on_node(aggregation))
        return reply_shapes(on_node, theta, phase, example)

    def write_messages(
        phase: str, parts: Mapping[int, list[str]], message: Message, cohort: Cohort
    ) -> dict[int, RecordDict]:
        arrays, t = wire.pack(message), cohort.round
        keys = dict(zip(cohort.ids, raw_keys(cohort).tolist(), strict=True))
        # A resumed run begins at its last checkpoint, or the one before.
        floor = (list_checkpoints(out)[-2:] or [t])[0]
        contents = {}
        for node, ids in parts.items():
            words = [word for name in ids for word in keys[name]]
            states = [int(cohort.states[name]) for name in ids if keeps and phase != INQUIRY]
            asked = wire.Assignment(
                phase, t, ids, words, population, num_examples, start.run, floor, states, largest
            )
            contents[node] = RecordDict(
                {wire.ARRAYS: arrays, wire.CONFIG: wire.write_fields(asked)}
            )
        return contents

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        if read_start(out) is None:  # not before the run is known to continue here
            write_atomically(out / CLIENTS, json.dumps(start._asdict()).encode())
        phase = next(name for name, update in updates.items() if update is client)
        (shapes, names), number = expect(phase), cohort.round + 1
        roster.refresh()
        if not roster.sites:
            roster.wait(1, f"round {number}:")
        holders = roster.holders()
        place = {name: index for index, name in enumerate(cohort.ids)}
        parts: dict[int, list[str]] = {}
        failures = {}
        for name in sorted(place):
            if name in holders:
                parts.setdefault(holders[name], []).append(name)
            else:
                failures[name] = "no connected node has it"
        sites = {node: roster.sites[node] for node in parts}
        contents = write_messages(phase, parts, message, cohort)
        answers = roster.exchange(contents, str(number))
        # Where no client counts, the sum is 0 and its weight, too: the server skips the round.
        empty = jax.eval_shape(as_sum, shapes)
        total = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), empty)
        reports: list[Report] = []
        tokens: dict[str, np.int32] = {}
        for node, ids in parts.items():  # by first ids: the same order every time
            sizes = {name: cohort.sizes[place[name]] for name in ids}
            try:
                with wire.reading():
                    answer = answers[node]
                    if isinstance(answer, wire.NodeError):
                        raise answer
                    part, report, infos = wire.read_reply(answer, shapes, names, sizes)
                    pairs = zip(sizes.items(), report.accepted, strict=True)
                    accepted = dict(client for client, ok in pairs if ok)
                    if is_possible is None:
                        expected = [counts.get(name, n) for name, n in accepted.items()]
                        weight = total_weight(served.weighting, expected)
                        sent = value_of(part)
                        wire.check_weight(sent.weight, weight, len(accepted))
                        infos = correct_norms(infos, float(norm_of(sent.mean)))
                    elif not is_possible(message, value_of(part), len(accepted)):
                        why = f"its sum is longer than that of {len(accepted)} clipped results"
                        raise wire.WireError(why)
                    merged = merge(total, part) if accepted else total
                    if not finite(merged):
                        why = "its sum is too large: together with the others it is not finite"
                        raise wire.WireError(why)
            except wire.WireError as error:
                name = sites[node].name
                failures.update(dict.fromkeys(ids, f"{name}: {error}"))
                log(WARNING, "fedpa: round %d: %s: %s", number, name, error)
                # Unless it has been restarted and has replied meanwhile.
                if isinstance(error, wire.NodeError) and roster.sites.get(node) is sites[node]:
                    roster.suspect(node)
                continue
            total = merged
            lost = [name for name in ids if name in report.lost]
            if lost:
                required = algorithm.is_state_required
                then = "they are left out" if required else "they start again"
                log(WARNING, LOST, number, sites[node].name, len(lost), lost[0], then)
                gone.update(lost if required else ())
            reasons = dict(zip(report.failed, report.reasons, strict=False))
            failures |= {name: reasons[name] for name in ids if name in reasons}
            members = [place[name] for name in ids]
            reports.append(Report(members, infos, report.accepted, list(sizes.values())))
            if keeps:
                tokens.update(dict.fromkeys(accepted, np.int32(number)))
                gone.difference_update(accepted)
        if len(gone) == len(start.clients):
            raise NoUsableClientError(
                f"round {number}: all {len(gone)} clients have lost their states, and the method "
                "can't do without: give nodes a state-dir in --node-config, and start the run "
                f"again in another directory than {str(out)!r}"
            )
        up = sum(wire.count_bytes(a) for a in answers.values() if isinstance(a, RecordDict))
        down = sum(wire.count_bytes(content) for content in contents.values())
        result = collect_reports(cohort, value(total), reports, failures, up // len(place))
        states = {**result.states, **tokens}
        return result._replace(states=states, traffic=Traffic(up, down))

    with_tokens = algorithm._replace(client_init=lambda theta: np.int32(0))
    return with_tokens if keeps else deploy(algorithm, out), run


def correct_norms(infos: dict[str, list[float]], least: float) -> dict[str, list[float]]:
    """What a node says of its clients, whose deltas can't all be shorter than their mean.

    A node that says so is lying, and each of its clients is taken to have sent the mean.
    """
    norms = infos.get("delta_norm")
    if norms is None or least <= 1.01 * max(norms, default=0.0):
        return infos
    return {**infos, "delta_norm": [least] * len(norms)}


def find_largest(
    connection: Connection, served: Served, clients: Mapping[str, int], algorithm: Algorithm
) -> int:
    """The largest weight of a client, a multiple of the median number of examples; 0: any.

    Numbers of examples are what nodes say. Private clients have weights of their own, and methods
    that don't weigh by examples none that can be bounded.
    """
    settings = served.method.settings() if isinstance(served.method, Described) else {}
    sizes = [n for n in clients.values() if n > 0]
    is_weighed = served.weighting == "examples" and "weighting" in settings
    if not is_weighed or algorithm.release is not None or not sizes or not connection.largest_ratio:
        return 0
    largest = math.ceil(connection.largest_ratio * float(np.median(sizes)))
    above = sum(n > largest for n in sizes)
    if above:
        log(WARNING, CAPPED, above, largest, connection.largest_ratio)
    return largest


def deploy(algorithm: Algorithm, out: Path) -> Algorithm:
    """A private algorithm with the randomness of a deployment, and its ledger; others unchanged."""
    release = algorithm.release
    if release is None:
        return algorithm
    if release.budget.sampling == "cyclic":
        expected = (
            "is not supported with Flower: its noise would be stored in checkpoints, and a "
            "repeated round is no turn. Use poisson or fixed"
        )
        raise refuse("sampling", "cyclic", expected)
    return algorithm._replace(release=release._replace(ledger=Ledger(out / LEDGER)))
