"""The ClientApp: what a SuperNode runs. It answers two kinds of messages.

- `query`: which clients the node has, and whether its model is the server's. The reply has their
  ids and numbers of examples, but no example.
- `train`: a round of some of its clients, run by the local engine. The reply has the sum of their
  results: the model is sent once each way, however many clients a node has, and the server merges
  sums as those of an engine's blocks.

An error is reported in the reply, in one line, and in the node's log.
"""

import functools
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import Mod
from flwr.supercore import log

import fedpa
from fedpa.algorithms.fedopt import Algorithm, ClientResult, ClientUpdate
from fedpa.algorithms.methods import Method, set_population
from fedpa.data.federated import FederatedData, check_when_read
from fedpa.engines.engine import Cohort, Engine, Report, RoundResult, collect_reports
from fedpa.engines.local import per_client
from fedpa.errors import BadValueError, FedpaError, refuse
from fedpa.flower import wire
from fedpa.flower.node import Holding, StateFiles, StateStore, read_holding, select_clients
from fedpa.objectives.client_data import ClientData
from fedpa.server.aggregation import sum_on_node
from fedpa.training.problem import Problem, prepare, some_examples
from fedpa.types import Key, Params

INQUIRY = "inquiry"
"""Used in place of a phase: the inquiry before a round."""
LOST = (
    "its state is lost: what it last sent stays as it is (state-dir in --node-config keeps states)"
)
"""Why a client is left out where the method can't do without its state."""


class Node(NamedTuple):
    """What a node runs."""

    clients: FederatedData
    prepare: Callable[[float, int, int], tuple[Algorithm, Params]]
    """(Σ q_i, number of examples, both of all nodes' clients; largest weight of one, 0 for any) →
    the algorithm, whose aggregation gives the sum, not yet divided; and θ, which has the model's
    shapes: its values come from the server."""
    engine: Engine


Load = Callable[[Mapping[str, Any], Holding], Node]
"""(the run's settings, what the node holds) → what it runs, with all clients of its data."""


def client_app(load: Load, mods: Sequence[Mod] = ()) -> ClientApp:
    """Make the app of a node, which runs its clients.

    Args:
        load: The run's settings → what the node runs, from `make_node(problem, method, …)`. Called
            once for the same settings in a process, whose engine keeps what it has compiled.
        mods: Flower's: functions around every message; default: none.
    Returns:
        Flower's app, for `flwr run`.
    Example:
        >>> def load(settings, holding):
        ...     return make_node(read_problem(holding.data_dir), method)
        >>> app = client_app(load)
    """
    check_mods(mods)
    app = ClientApp(mods=list(mods))
    app.query()(_report_errors(functools.partial(_answer_query, load)))
    app.train()(_report_errors(functools.partial(_answer_train, load)))
    return app


def check_mods(mods: Sequence[Mod]) -> None:
    """Refuse Flower's mods for differential privacy: a reply is a sum over clients, not a model."""
    for mod in mods:
        if isinstance(mod, LocalDpMod) or mod in (adaptiveclipping_mod, fixedclipping_mod):
            name = getattr(mod, "__name__", type(mod).__name__)
            expected = (
                "clips and noises a model, and a node's reply is the sum of its clients' results: "
                "use fedpa.private"
            )
            raise refuse("mods", name, expected)


def make_node(problem: Problem, method: Method, engine: Engine | None = None) -> Node:
    """Make what a node runs: the problem's clients by the method.

    What is known of all nodes' clients together, which a prior and some methods need, comes from
    the server with each round.

    Args:
        problem: Its clients are those of the node's data.
        method: As on the server.
        engine: Where clients run; default: one after the other, since a process may live for one
            round, and programs for several clients side by side take longer to compile.
    Returns:
        The node, for `client_app`.
    Raises:
        FedpaError: Loss, model, data and method don't fit together.
    Example:
        >>> clients = fedpa.data.from_mapping({"a": {"x": np.eye(3, 2), "y": np.arange(3) % 2}})
        >>> def loss(params, batch, key):
        ...     logits = batch["x"] @ params
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        >>> metric = fedpa.metrics.classifier(lambda params, x: x @ params)
        >>> problem = Problem(clients, lambda key: jnp.zeros((2, 2)), loss, metric, test=clients)
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 2), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> make_node(problem, method).clients.ids
        ['a']
    """
    model = _make_model(problem.init)

    @functools.lru_cache(maxsize=2)  # a query's and a run's
    def prepare_for(population: float, num_examples: int, largest: int) -> tuple[Algorithm, Params]:
        told = set_population(method, population)
        objective = problem.objective._replace(num_examples=num_examples)
        # The number of rounds does not affect clients.
        algorithm, theta, *_ = prepare(objective, model, problem.clients, told, sys.maxsize)
        undivided = sum_on_node(algorithm.aggregation)._replace(value=lambda total: total)
        algorithm = algorithm._replace(aggregation=undivided)
        return (bound_weights(algorithm, largest) if largest else algorithm), theta

    engine = per_client() if engine is None else engine
    return Node(check_when_read(problem.clients), prepare_for, engine)


def bound_weights(algorithm: Algorithm, largest: int) -> Algorithm:
    """Clients with more examples than `largest` weigh as if they had so many."""

    def bound(client: ClientUpdate) -> ClientUpdate:
        def update(message: Any, data: ClientData, state: Any, key: Key) -> ClientResult:
            out = client(message, data, state, key)
            share = largest / jnp.maximum(data.n, largest)
            weight = jax.tree.map(lambda q: jnp.round(q * share.astype(q.dtype)), out.weight)
            return out._replace(weight=weight)

        return update

    clients = {name: bound(client) for name, client in algorithm.clients.items()}
    inquiry = algorithm.inquiry
    if inquiry is not None:
        inquiry = inquiry._replace(client=bound(inquiry.client))
    return algorithm._replace(clients=clients, inquiry=inquiry)


def _make_model(init: Any) -> Any:
    """A model of the right shapes, without the time that a random one takes."""
    shapes = eqx.filter_eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    leaves = jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
        return init(jax.random.key(0))  # it has arrays that are not trained, and not sent
    return jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes
    )


# The shapes of messages, which both sides compare and check.


def list_updates(algorithm: Algorithm) -> dict[str, ClientUpdate]:
    """What clients do, by phase."""
    inquiry = {} if algorithm.inquiry is None else {INQUIRY: algorithm.inquiry.client}
    return {**algorithm.clients, **inquiry}


def message_shapes(algorithm: Algorithm, theta: Params, phase: str) -> Any:
    """The shapes of what clients are sent."""
    state = jax.eval_shape(algorithm.init, theta)
    if phase == INQUIRY and algorithm.inquiry is not None:
        return jax.eval_shape(algorithm.inquiry.broadcast, state)
    t = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    return jax.eval_shape(algorithm.broadcast, state, t)


def example_shapes(data: FederatedData) -> Any:
    """The shapes of one example's arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)),
        some_examples(data),
    )


def reply_shapes(
    algorithm: Algorithm, theta: Params, phase: str, example: Any
) -> tuple[Any, tuple[str, ...]]:
    """The shapes of the sum that a node sends, and the names of its numbers about each client."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), example)

    def reply(message: Any, rows: Any, key: Any) -> Any:
        data = ClientData(rows, jnp.asarray(1, jnp.int32))
        update = list_updates(algorithm)[phase]
        out = update(message, data, algorithm.client_init(theta), key)
        return algorithm.aggregation.init(out.result, out.weight), out.info._asdict()

    message = message_shapes(algorithm, theta, phase)
    total, infos = jax.eval_shape(reply, message, rows, jax.random.key(0))
    return total, tuple(infos)


def describe_node(node: Node) -> dict[str, str]:
    """What must be the same on the server and on a node: arrays that are sent, and of examples.

    Raises FedpaError if loss, model, data and method don't fit together.
    """
    algorithm, theta = node.prepare(1.0, 1, 0)
    message = message_shapes(algorithm, theta, next(iter(algorithm.clients)))
    return wire.describe_arrays({"message": message, "example": example_shapes(node.clients)})


# The answers.


def _find_node(load: Load, context: Context) -> tuple[Holding, Node]:
    holding = read_holding(context.node_config)
    settings = tuple(sorted(context.run_config.items()))
    return holding, _load_node(load, settings, holding)


# Of the module, not of the app: Flower's simulation sends the app to other processes.
@functools.lru_cache(maxsize=4)
def _load_node(load: Load, settings: tuple[Any, ...], holding: Holding) -> Node:
    whole = load(dict(settings), holding)
    return whole._replace(clients=select_clients(holding, whole.clients))


def _answer_query(load: Load, content: RecordDict, context: Context) -> RecordDict:
    """Answer which clients the node has."""
    query = wire.read_fields(wire.Query, content)
    if query.version != fedpa.__version__:
        raise FedpaError(
            f"fedpa is {query.version} on the server and {fedpa.__version__} on the node: "
            "versions must be the same"
        )
    _, node = _find_node(load, context)
    theirs, ours = json.loads(query.arrays), describe_node(node)
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            raise FedpaError(
                f"{name} is {theirs.get(name, 'missing')} on the server and "
                f"{ours.get(name, 'missing')} on the node: task, data and version of fedpa must "
                "be the same on both"
            )
    ids = list(node.clients.ids)
    sizes = [node.clients.num_examples(name) for name in ids]
    introduction = wire.Introduction(_name(context), ids, sizes)
    return RecordDict({wire.CONFIG: wire.write_fields(introduction)})


def _answer_train(load: Load, content: RecordDict, context: Context) -> RecordDict:
    """Run a round of some of the clients."""
    assignment = wire.read_fields(wire.Assignment, content)
    holding, node = _find_node(load, context)
    algorithm, theta = node.prepare(
        assignment.population, assignment.num_examples, assignment.largest
    )
    shapes = message_shapes(algorithm, theta, assignment.phase)
    message = wire.unpack(shapes, content[wire.ARRAYS])
    ids, states, lost = assignment.clients, dict[str, Any](), list[str]()
    if assignment.states:
        store, floor = _find_store(context, holding, assignment)
        template = algorithm.client_init(theta)
        states, lost = store.take(template, ids, assignment.states, floor)
    left_out = frozenset(lost if algorithm.is_state_required else ())
    result = run_clients(node, assignment, message, states, left_out)
    accepted = [bool(ok) for ok in result.accepted]
    if assignment.states:
        kept = {name: result.states[name] for name, ok in zip(ids, accepted, strict=True) if ok}
        store.put(kept, assignment.round + 1)
    examples = [int(n) for n in result.examples]
    failed, reasons = list(result.failures), list(result.failures.values())
    report = wire.Report(ids, accepted, examples, failed, reasons, lost)
    # Diagnostics are not noised: a private run's nodes don't send them.
    shown = result.infos if algorithm.release is None else {}
    infos: dict[str, Any] = {
        name: [float(v) for v in np.asarray(values)] for name, values in shown.items()
    }
    return RecordDict(
        {
            wire.ARRAYS: wire.pack(result.aggregate),
            wire.CONFIG: wire.write_fields(report),
            wire.METRICS: MetricRecord(infos),
        }
    )


def run_clients(
    node: Node,
    assignment: wire.Assignment,
    message: Any,
    states: Mapping[str, Any],
    left_out: Collection[str] = (),
) -> RoundResult:
    """The round of the node's clients; its aggregate is the sum, not yet divided."""
    algorithm, theta = node.prepare(
        assignment.population, assignment.num_examples, assignment.largest
    )
    ids = assignment.clients
    unknown = sorted(set(ids) - set(node.clients.ids))
    if unknown:
        raise FedpaError(f"the node does not have client {unknown[0]!r}")
    words: Any = np.asarray(assignment.keys, np.uint32).reshape(len(ids), -1)
    new = algorithm.client_init(theta)
    cohort = Cohort(
        ids,
        node.clients.examples,
        jax.random.wrap_key_data(words),
        {name: states.get(name, new) for name in ids},
        [node.clients.num_examples(name) for name in ids],
        None,
        sorted({node.clients.num_examples(name) for name in node.clients.ids}),
    )
    update = list_updates(algorithm)[assignment.phase]
    if not left_out:
        return node.engine(update, algorithm.aggregation, message, cohort)
    members = [member for member, name in enumerate(ids) if name not in left_out]
    failures = dict.fromkeys(left_out, LOST)
    if not members:
        shapes, _ = reply_shapes(algorithm, theta, assignment.phase, example_shapes(node.clients))
        nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        return collect_reports(cohort, nothing, [], failures, 0)
    some = cohort._replace(
        ids=[ids[member] for member in members],
        keys=cohort.keys[np.asarray(members)],
        sizes=[cohort.sizes[member] for member in members],
    )
    result = node.engine(update, algorithm.aggregation, message, some)
    report = Report(members, result.infos, result.accepted, result.examples)
    failures |= result.failures
    whole = collect_reports(cohort, result.aggregate, [report], failures, result.bytes_up)
    return whole._replace(states={**whole.states, **result.states})


def _find_store(
    context: Context, holding: Holding, assignment: wire.Assignment
) -> tuple[StateStore, int]:
    """Where clients' states are, and from which round on they may be asked for again."""
    if not holding.state_dir:  # a run that is resumed would find nothing here: no round is repeated
        return StateStore(context.state), assignment.round
    if not assignment.run.isalnum():  # it becomes a directory's name
        raise FedpaError(f"run = {assignment.run!r}: must be letters and digits")
    return StateStore(StateFiles(Path(holding.state_dir) / assignment.run)), assignment.floor


def _name(context: Context) -> str:
    """The node's name in messages, also when its other settings can't be read."""
    number = context.node_config.get("partition-id", context.node_id)
    return str(context.node_config.get("name") or f"node {number}")


def _report_errors(
    function: Callable[[RecordDict, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        try:
            content = function(message.content, context)
        except Exception as error:
            # Refusals name settings and clients; other errors may quote data and are not sent.
            known = isinstance(error, FedpaError) and not isinstance(error, BadValueError)
            text = str(error) if known else f"{type(error).__name__}; the node's log has more"
            log(ERROR, "fedpa: %s", error, exc_info=not known)
            said: dict[str, Any] = {"error": text[:1000], "name": _name(context)}
            content = RecordDict({wire.CONFIG: ConfigRecord(said)})
        return Message(content, reply_to=message)

    return reply
