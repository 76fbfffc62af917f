"""Which algorithms' messages add up, so that secure aggregation can hide each client's.

Secure aggregation gives the server Σ q_i r_i and Σ q_i of what clients send, and no r_i. That is
enough if the aggregation is a weighted mean, of the r_i or of what is linear in them (a matrix of
which one triangle is sent). It is not if the server needs each of them (a median), or adds what is
not linear in them (of a sketch Z_i, Z_i Z_iᵀ).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate
from fedpa.algorithms.private import sum_of_one
from fedpa.objectives.client_data import ClientData
from fedpa.server.aggregation import is_mean
from fedpa.types import Params

__all__ = ["has_secure_sums"]


def has_secure_sums(algorithm: Algorithm, theta: Params, examples: Any) -> bool:
    """Whether the server needs only weighted sums of what clients send, in every phase.

    Nothing is trained: made-up results of the clients' shapes are added up.

    Args:
        algorithm: Any.
        theta: Parameters that it trains, or arrays like them.
        examples: Examples of any client; only shapes and types matter.
    Returns:
        Whether secure aggregation can carry its rounds.
    Example:
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 2), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> algorithm = method(fedpa.Objective(lambda params, batch, key: (params - batch) ** 2))
        >>> has_secure_sums(algorithm, jnp.zeros(()), np.zeros(3, np.float32))
        True
    """
    if not is_mean(algorithm.aggregation):
        return False
    state = jax.eval_shape(algorithm.init, theta)
    t = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
    message = jax.eval_shape(algorithm.broadcast, state, t)
    sent = [(client, message) for client in algorithm.clients.values()]
    if algorithm.inquiry is not None:
        asked = jax.eval_shape(algorithm.inquiry.broadcast, state)
        sent.append((algorithm.inquiry.client, asked))
    return all(_is_linear(algorithm, *one, theta, examples) for one in sent)


def _is_linear(
    algorithm: Algorithm, client: ClientUpdate, message: Any, theta: Params, examples: Any
) -> bool:
    def send(message: Any, rows: Any, key: Any) -> Any:
        data = ClientData(rows, jnp.asarray(1, jnp.int32))
        return client(message, data, algorithm.client_init(theta), key).result

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), examples)
    shapes = jax.eval_shape(send, message, rows, jax.random.key(0))
    one, other = (_make_up(shapes, first) for first in (1, 2))
    both = jax.tree.map(jnp.add, one, other)
    add = functools.partial(sum_of_one, algorithm.aggregation)
    sums = jax.tree.map(jnp.add, add(one), add(other))
    return bool(jax.tree.all(jax.tree.map(jnp.array_equal, add(both), sums)))


def _make_up(shapes: Any, first: int) -> Any:
    """Results of small whole numbers, whose sums have no rounding."""
    return jax.tree.map(
        lambda x: (first + jnp.arange(x.size).reshape(x.shape) % 3).astype(x.dtype), shapes
    )
