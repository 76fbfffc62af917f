"""A whole run as one compiled program: small federations of equal clients, all in every round.

The same algorithms, client updates, aggregation and keys as in `fedpa.train`, whose numbers it
gives (a test), but a pure function of θ and the seed's key: it vectorizes over seeds, starts and
learning rates, which is what a study of many small runs needs.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, Cohort, fed_round
from fedpa.errors import FedpaError
from fedpa.objectives.client_data import ClientData, num_rows
from fedpa.server import optimizers
from fedpa.server.update import Server
from fedpa.training.loop import client_hashes, keys_at
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
    if jax.tree.leaves(algorithm.client_init(theta)):
        raise FedpaError("algorithm keeps client states: fedpa.train runs it")

    def one_round(phase: str) -> Any:
        def step(state: Any, t: jax.Array) -> tuple[Any, Path]:
            cohort = Cohort(clients.data, keys_at(root, t, clients.hashes))
            state, left = fed_round(algorithm, state, cohort, t, phase)
            infos = jax.tree.map(lambda values: jnp.mean(values, axis=0), left.client_info)
            return state, Path(algorithm.parameters(state), infos)

        return step

    state = algorithm.init(theta)
    pieces = []
    for phase, ts in itertools.groupby(range(rounds), algorithm.phase):
        state, piece = jax.lax.scan(one_round(phase), state, jnp.asarray(list(ts)))
        pieces.append(piece)
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *pieces)


def simulate_rates(
    simulate_one: Callable[..., Any],
    runs: Sequence[tuple[Params, int]],
    rates: Sequence[float],
    *shared: Any,
) -> Any:
    """Simulate every run at every rate of a plain SGD server, all as one program.

    Args:
        simulate_one: (server, θ₀, key, *shared) → what is kept of a run.
        runs: Each run's θ₀ and seed.
        rates: Server learning rates.
        shared: What is the same for all and too large for a constant of the program.
    Returns:
        What `simulate_one` gives, in float64, with axes (runs, rates, …).
    """

    def one(theta: Params, seed: jax.Array, rate: jax.Array, shared: Any) -> Any:
        server = Server(optimizers.sgd(1.0), schedule=lambda t: rate)
        return simulate_one(server, theta, jax.random.key(seed), *shared)

    thetas, seeds, tried = zip(*((*run, rate) for run in runs for rate in rates), strict=True)
    values = jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None)))(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *thetas),
        jnp.asarray(seeds, jnp.uint32),
        jnp.asarray(tried, jnp.float32),
        shared,
    )
    shape = (len(runs), len(rates))
    return jax.tree.map(
        lambda array: np.asarray(array, np.float64).reshape(*shape, *array.shape[1:]), values
    )
