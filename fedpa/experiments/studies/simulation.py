"""A whole run as one compiled program: small federations of equal clients, all in every round.

The same algorithms, client updates, aggregation and keys as in `fedpa.train`, whose numbers it
gives (a test), but a pure function of θ and the seed's key: it vectorizes over seeds, starts and
learning rates, which is what a study of many small runs needs.
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.algorithms.algorithm import Algorithm
from fedpa.errors import FedpaError
from fedpa.objectives.client_data import ClientData, num_rows
from fedpa.training.cohort import client_hashes, keys_at
from fedpa.types import Key, Params


class Clients(NamedTuple):
    """Equally many examples each, so that no step is computed for padding."""

    data: ClientData
    """Examples with a first axis over clients; one n for all."""
    hashes: jax.Array


class Path(NamedTuple):
    theta: Any
    """θ after every round, stacked on axis 0."""
    infos: Any
    """The clients' infos of every round, averaged over clients."""


def equal_clients(examples: Mapping[str, Any]) -> Clients:
    """client id → arrays of equal shapes."""
    sizes = {num_rows(arrays) for arrays in examples.values()}
    if len(sizes) != 1:
        raise FedpaError(f"clients have {sorted(sizes)} examples: all must have equally many")
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *examples.values())
    data = ClientData(stacked, jnp.asarray(sizes.pop(), jnp.int32))
    return Clients(data, jnp.asarray(client_hashes(list(examples))))


def simulate(algorithm: Algorithm, theta: Params, clients: Clients, root: Key, rounds: int) -> Path:
    """`rounds` rounds of a stateless algorithm from θ; `root` is `jax.random.key(seed)`."""
    if algorithm.inquiry is not None or jax.tree.leaves(algorithm.client_init(theta)):
        raise FedpaError("algorithm asks twice or keeps client states: fedpa.train runs it")

    def one_round(phase: str) -> Any:
        client = algorithm.clients[phase]

        def step(state: Any, t: jax.Array) -> tuple[Any, Path]:
            message = algorithm.broadcast(state, t)
            keys = keys_at(root, t, clients.hashes)
            n = clients.data.n  # not vectorized over: loops have one length for all
            out = jax.vmap(lambda examples, key: client(message, ClientData(examples, n), (), key))(
                clients.data.examples, keys
            )
            sent = (out.result, out.weight)
            first = jax.tree.map(
                lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), sent
            )
            total, _ = jax.lax.scan(
                lambda total, one: (algorithm.aggregation.add(total, *one)[0], None),
                algorithm.aggregation.init(*first),
                sent,
            )
            state, _ = algorithm.server(state, algorithm.aggregation.value(total), t)
            infos = jax.tree.map(lambda values: jnp.mean(values, axis=0), out.info)
            return state, Path(algorithm.parameters(state), infos)

        return step

    state = algorithm.init(theta)
    pieces = []
    for phase, ts in itertools.groupby(range(rounds), algorithm.phase):
        state, piece = jax.lax.scan(one_round(phase), state, jnp.asarray(list(ts)))
        pieces.append(piece)
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *pieces)
