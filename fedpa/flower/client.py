"""The ClientApp: what a SuperNode runs. A node is asked two things.

- `query`: which clients it holds, and whether its model is the server's. It answers with their ids,
  their numbers of examples and the shapes of an example's arrays, and no example.
- `train`: a round of some of its clients, which the local engine runs. It answers with the sum of
  their results: the model crosses the wire once each way, however many clients a node has, and the
  server merges sums as it merges those of its own engines' blocks.

An error is reported in the answer, in one line, and in the node's log.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from logging import ERROR
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.supercore import log

import fedpa
from fedpa.algorithms.fedopt import Algorithm, ClientUpdate
from fedpa.algorithms.methods import Method, OfPopulation
from fedpa.data.federated import FederatedData, check_when_read
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import per_client
from fedpa.errors import BadValueError, FedpaError
from fedpa.flower import wire
from fedpa.flower.settings import Holding, check_state_dir, read_holding, select_clients
from fedpa.flower.states import Store, in_context, in_directory
from fedpa.objectives.client_data import ClientData
from fedpa.server.aggregation import Aggregation
from fedpa.training.problem import Problem, prepare, some_examples
from fedpa.types import Keys, Params

INQUIRY = "inquiry"
"""In place of a phase: what clients are asked before a round."""


class Node(NamedTuple):
    """What a node runs."""

    clients: FederatedData
    algorithm: Algorithm
    theta: Params
    """Has the model's shapes; its values come from the server."""
    engine: Engine


Load = Callable[[Mapping[str, Any], Holding, float], Node]
"""(the run's settings, what the node holds, Σ q_i over all nodes' clients) → what it runs, with all
clients of its data."""


def client_app(load: Load, mods: Sequence[Mod] = ()) -> ClientApp:
    """An app that runs a node's clients.

    Args:
        load: The run's settings → what the node runs, from `make_node(problem, method, …)`. Called
            once for the same settings in a process, whose engine keeps what it has compiled.
        mods: Flower's: functions around every message.

    Example:
        >>> def load(settings, holding, population):
        ...     return make_node(read_problem(holding.data_dir), method, population)
        >>> app = client_app(load)  # doctest: +SKIP
    """
    app = ClientApp(mods=list(mods))

    def node_of(context: Context, population: float) -> Node:
        settings = tuple(sorted(context.run_config.items()))
        return _load_node(load, settings, read_holding(context.node_config), population)

    app.query()(_report_errors(functools.partial(_answer_query, node_of)))
    app.train()(_report_errors(functools.partial(_answer_train, node_of)))
    return app


# Of the module, not of the app: Flower's simulation sends the app to other processes.
@functools.lru_cache(maxsize=4)
def _load_node(load: Load, settings: tuple[Any, ...], holding: Holding, population: float) -> Node:
    whole = load(dict(settings), holding, population)
    return whole._replace(clients=select_clients(holding, whole.clients))


def make_node(
    problem: Problem, method: Method, population: float, engine: Engine | None = None
) -> Node:
    """What a node runs: the problem's clients by the method.

    Args:
        problem: Its clients are those of the node's data.
        method: As on the server.
        population: Σ q_i over all nodes' clients, for methods that have to know.
        engine: Where clients run; default: one after the other, since a process may live for one
            round, and programs for several clients side by side take longer to compile.
    """
    if isinstance(method, OfPopulation):
        method = method.method(population)
    model = _make_model(problem.init)
    # How many rounds there are makes no difference to what a client does.
    algorithm, theta, _ = prepare(problem.objective, model, problem.clients, method, sys.maxsize)
    engine = per_client() if engine is None else engine
    return Node(check_when_read(problem.clients), algorithm, theta, engine)


def _make_model(init: Any) -> Any:
    """A model of the right shapes, without the time that a random one takes."""
    shapes = eqx.filter_eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    leaves = jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
        return init(jax.random.key(0))  # it has arrays that are not trained, and not sent
    return jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes
    )


# What is sent, known before anything is: both sides compare and check by it.


def find_update(algorithm: Algorithm, phase: str) -> ClientUpdate:
    if phase == INQUIRY and algorithm.inquiry is not None:
        return algorithm.inquiry.client
    if phase not in algorithm.clients:
        known = ", ".join(algorithm.clients)
        raise FedpaError(f"phase = {phase!r}: the method has {known}")
    return algorithm.clients[phase]


def message_shapes(algorithm: Algorithm, theta: Params, phase: str | None = None) -> Any:
    """The shapes of what clients are sent; default: in the method's first phase."""
    state = jax.eval_shape(algorithm.init, theta)
    if phase == INQUIRY and algorithm.inquiry is not None:
        return jax.eval_shape(algorithm.inquiry.broadcast, state)
    t = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    return jax.eval_shape(algorithm.broadcast, state, t)


def example_shapes(data: FederatedData) -> Any:
    """The shapes of one example's arrays, which is all that a node says about them."""
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
        update = find_update(algorithm, phase)
        out = update(message, data, algorithm.client_init(theta), key)
        return algorithm.aggregation.init(out.result, out.weight), out.info._asdict()

    message = message_shapes(algorithm, theta, phase)
    total, infos = jax.eval_shape(reply, message, rows, jax.random.key(0))
    return total, tuple(infos)


# The answers.

NodeOf = Callable[[Context, float], Node]


def _answer_query(node_of: NodeOf, content: RecordDict, context: Context) -> RecordDict:
    """Which clients are here?"""
    asked = wire.read_config(content)
    if asked.get("version") != fedpa.__version__:
        raise FedpaError(
            f"fedpa is {asked.get('version')!s} on the server and {fedpa.__version__} on the node: "
            "versions must be the same"
        )
    check_state_dir(read_holding(context.node_config))
    node = node_of(context, 1.0)
    theirs = json.loads(str(asked["shapes"]))
    ours = wire.describe_arrays(message_shapes(node.algorithm, node.theta))
    for name in [*theirs, *ours]:
        if theirs.get(name) != ours.get(name):
            raise FedpaError(
                f"{name} is {theirs.get(name, 'not there')} on the server and "
                f"{ours.get(name, 'not there')} on the node: task, data and version of fedpa must "
                "be the same on both"
            )
    ids = list(node.clients.ids)
    said: dict[str, Any] = {
        "name": _name(context),
        "clients": ids,
        "examples": [node.clients.num_examples(name) for name in ids],
        "kind": wire.describe_example(example_shapes(node.clients)),
    }
    return RecordDict({wire.CONFIG: ConfigRecord(said)})


def _answer_train(node_of: NodeOf, content: RecordDict, context: Context) -> RecordDict:
    """A round of some of the clients."""
    asked: Any = wire.read_config(content)
    phase, t = str(asked["phase"]), int(asked["round"])
    ids = [str(name) for name in asked["clients"]]
    node = node_of(context, float(asked["population"]))
    message = wire.unpack(message_shapes(node.algorithm, node.theta, phase), content)
    states, lost = dict[str, Any](), list[str]()
    store: Store | None = None
    if "states" in asked:
        store, floor = _find_store(context, asked, t)
        template = node.algorithm.client_init(node.theta)
        states, lost = store.take(template, ids, asked["states"], floor)
    result = run_clients(node, phase, ids, asked["keys"], message, states)
    said: dict[str, Any] = {
        "clients": ids,
        "accepted": [bool(ok) for ok in result.accepted],
        "examples": [int(n) for n in result.examples],
    }
    if result.failures:
        said["failures"] = json.dumps(dict(result.failures))
    if store is not None:
        accepted = [name for name, ok in zip(ids, result.accepted, strict=True) if ok]
        store.put({name: result.states[name] for name in accepted}, t + 1)
    if lost:  # Flower can't measure an empty list
        said["lost"] = lost
    infos: dict[str, Any] = {
        name: [float(v) for v in np.asarray(values)] for name, values in result.infos.items()
    }
    return RecordDict(
        {
            **wire.pack(result.aggregate),
            wire.CONFIG: ConfigRecord(said),
            wire.METRICS: MetricRecord(infos),
        }
    )


def run_clients(
    node: Node,
    phase: str,
    ids: Sequence[str],
    keys: Sequence[int],
    message: Any,
    states: Mapping[str, Any],
) -> RoundResult:
    """The round of the node's clients `ids`; its aggregate is the sum, not yet divided.

    keys: the words of their keys, one client's after the other's. The server has made them for its
    cohort anyway; to make them here would take a tenth of a second of every message.
    """
    unknown = sorted(set(ids) - set(node.clients.ids))
    if unknown:
        raise FedpaError(f"the node does not hold client {unknown[0]!r}")
    new = node.algorithm.client_init(node.theta)
    cohort = Cohort(
        ids,
        node.clients.examples,
        _read_keys(keys, len(ids)),
        {name: states.get(name, new) for name in ids},
        [node.clients.num_examples(name) for name in ids],
        None,
        sorted({node.clients.num_examples(name) for name in node.clients.ids}),
    )
    update = find_update(node.algorithm, phase)
    return node.engine(update, _undivided(node.algorithm.aggregation), message, cohort)


def _read_keys(words: Sequence[int], clients: int) -> Keys:
    size = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size
    if len(words) != clients * size or not all(0 <= word < 2**32 for word in words):
        raise FedpaError(f"keys: must be {size} words of 32 bits for each of {clients} clients")
    raw: Any = np.asarray(words, np.uint32).reshape(clients, size)
    return jax.random.wrap_key_data(raw)


@functools.lru_cache(maxsize=8)
def _undivided(aggregation: Aggregation) -> Aggregation:
    """Its sums as they are. The same object each time: engines keep programs by it."""
    return aggregation._replace(value=lambda total: total)


def _find_store(context: Context, asked: Any, t: int) -> tuple[Store, int]:
    """Where clients' states are, and from which round on they may be asked for again."""
    directory = read_holding(context.node_config).state_dir
    if not directory:  # a run that is resumed would find nothing here: no round is repeated
        return in_context(context.state), t
    run = str(asked["run"])
    if not run.isalnum():  # it becomes a directory's name
        raise FedpaError(f"run = {run!r}: must be letters and digits")
    return in_directory(Path(directory) / run), int(asked["floor"])


def _name(context: Context) -> str:
    try:
        holding = read_holding(context.node_config)
    except FedpaError:
        holding = Holding(str(context.node_config.get("name") or ""))
    if holding.name:
        return holding.name
    if holding.partition_id is not None:
        return f"node {holding.partition_id}"
    return f"node {context.node_id}"


def _report_errors(
    function: Callable[[RecordDict, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    def reply(message: Message, context: Context) -> Message:
        try:
            content = function(message.content, context)
        except Exception as error:
            # What we refuse names settings and clients; other errors may quote data, and stay.
            known = isinstance(error, FedpaError) and not isinstance(error, BadValueError)
            text = str(error) if known else f"{type(error).__name__}; the node's log has more"
            log(ERROR, "fedpa: %s", error, exc_info=not known)
            said: dict[str, Any] = {"error": text[:1000], "name": _name(context)}
            content = RecordDict({wire.CONFIG: ConfigRecord(said)})
        return Message(content, reply_to=message)

    return reply
