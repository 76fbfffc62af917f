"""A node's side of a round: its clients, run by the local engine, their results summed.

The sum, not each client's result, is sent: the model crosses the wire once each way, however many
clients a node has, and the server merges sums as it merges those of its own engines' blocks.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate
from fedpa.algorithms.methods import Method, OfPopulation
from fedpa.data.federated import FederatedData, check_when_read
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.per_client import per_client
from fedpa.errors import FedpaError
from fedpa.objectives.client_data import ClientData
from fedpa.server.aggregation import Aggregation
from fedpa.training.problem import Problem, prepare, some_examples
from fedpa.types import Keys, Params

INQUIRY = "inquiry"
"""In place of a phase: what clients are asked before a round."""


class Node(NamedTuple):
    clients: FederatedData
    algorithm: Algorithm
    theta: Params
    """Of the model's shapes; its values are the server's to say."""
    engine: Engine


def make_node(
    problem: Problem, method: Method, population: float, engine: Engine | None = None
) -> Node:
    """What a node runs: the problem's clients by the method.

    Args:
        problem: Its clients are those of the node's data.
        method: As on the server.
        population: Σ q_i over all nodes' clients, for methods that have to know.
        engine: Where clients run; in turn by default, since a process may live for one round, and
            programs for several clients side by side take longer to make.
    """
    if isinstance(method, OfPopulation):
        method = method.method(population)
    model = _any_model(problem.init)
    # How many rounds there are makes no difference to what a client does.
    algorithm, theta, _ = prepare(problem.objective, model, problem.clients, method, sys.maxsize)
    engine = per_client() if engine is None else engine
    return Node(check_when_read(problem.clients), algorithm, theta, engine)


def _any_model(init: Any) -> Any:
    """A model of the right shapes, without the time that a random one takes."""
    shapes = eqx.filter_eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    leaves = jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct)))
    if not all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves):
        return init(jax.random.key(0))  # it has arrays that are not trained, and not sent
    return jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, shapes
    )


def client_of(algorithm: Algorithm, phase: str) -> ClientUpdate:
    if phase == INQUIRY and algorithm.inquiry is not None:
        return algorithm.inquiry.client
    if phase not in algorithm.clients:
        known = ", ".join(algorithm.clients)
        raise FedpaError(f"phase = {phase!r}: the method has {known}")
    return algorithm.clients[phase]


def message_shapes(algorithm: Algorithm, theta: Params, phase: str) -> Any:
    """The shapes of what clients are sent."""
    state = jax.eval_shape(algorithm.init, theta)
    if phase == INQUIRY and algorithm.inquiry is not None:
        return jax.eval_shape(algorithm.inquiry.broadcast, state)
    t = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    return jax.eval_shape(algorithm.broadcast, state, t)


def example_shapes(data: FederatedData) -> Any:
    """The shapes of one example's arrays, which is all that is told of them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jax.dtypes.canonicalize_dtype(x.dtype)),
        some_examples(data),
    )


class Sent(NamedTuple):
    """What a node sends."""

    total: Any
    """The shapes of its clients' sum."""
    infos: tuple[str, ...]
    """The names of the numbers it tells of each."""


def sent_shapes(algorithm: Algorithm, theta: Params, phase: str, examples: Any) -> Sent:
    """What a node will send. `examples`: the shapes of one example's arrays."""
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), examples)

    def total(message: Any, rows: Any, key: Any) -> Any:
        data = ClientData(rows, jnp.asarray(1, jnp.int32))
        update = client_of(algorithm, phase)
        out = update(message, data, algorithm.client_init(theta), key)
        return algorithm.aggregation.init(out.result, out.weight), out.info._asdict()

    message = message_shapes(algorithm, theta, phase)
    shapes, infos = jax.eval_shape(total, message, rows, jax.random.key(0))
    return Sent(shapes, tuple(infos))


def answer(
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
    unknown = [name for name in ids if name not in node.clients.ids]
    if unknown:
        raise FedpaError(f"the node does not hold client {unknown[0]!r}")
    sizes = [node.clients.num_examples(name) for name in node.clients.ids]
    cohort = Cohort(
        ids,
        node.clients.examples,
        _as_keys(keys, len(ids)),
        {name: states.get(name, node.algorithm.client_init(node.theta)) for name in ids},
        [node.clients.num_examples(name) for name in ids],
        None,
        sorted(set(sizes)),
    )
    update = client_of(node.algorithm, phase)
    return node.engine(update, _undivided(node.algorithm.aggregation), message, cohort)


def _as_keys(words: Sequence[int], clients: int) -> Keys:
    size = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size
    if len(words) != clients * size or not all(0 <= word < 2**32 for word in words):
        raise FedpaError(f"keys: must be {size} words of 32 bits for each of {clients} clients")
    raw: Any = np.asarray(words, np.uint32).reshape(clients, size)
    return jax.random.wrap_key_data(raw)


@functools.lru_cache(maxsize=8)
def _undivided(aggregation: Aggregation) -> Aggregation:
    """Its sums as they are. The same object each time: engines keep programs by it."""
    return aggregation._replace(value=lambda total: total)
