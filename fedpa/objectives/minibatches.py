"""Minibatches of a client's data, drawn inside compiled code and exact under padding.

Two ways to visit the examples: `shuffle`, a new order every epoch with the last, partial batch a
step of its own (the paper's experiments), and `replacement`, independent draws at every step
(what the theory of iterate averaging assumes).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpa.errors import refuse
from fedpa.objectives.client_data import ClientData
from fedpa.types import Count, Examples, Key

Order = Literal["shuffle", "replacement"]
"""How mini-batches are drawn: from reshuffled epochs, or independently at every step."""


def check_order(order: str) -> None:
    if order not in get_args(Order):
        raise refuse("order", order, "must be 'shuffle' or 'replacement'")


class Minibatch(NamedTuple):
    examples: Examples
    weights: Float[Array, " b"]
    """1 for an example, 0 for padding."""


def steps_per_epoch(n: Count, batch_size: int) -> Count:
    """⌈n / batch_size⌉; 0 for an empty client."""
    return (n + batch_size - 1) // batch_size


def epoch_order(data: ClientData, key: Key) -> Int[Array, " capacity"]:
    """A random order whose first n entries are a permutation of the examples.

    Each row's sort key depends on its index alone, so the order of the real rows is the same
    however much padding follows them.
    """
    capacity = jax.tree.leaves(data.examples)[0].shape[0]
    rows = jnp.arange(capacity, dtype=jnp.int32)
    ranks = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(key, row), dtype=jnp.uint32))(
        rows
    )
    # Padding goes last: a tie with a real row's rank is broken by the index, which is larger.
    ranks = jnp.where(rows < data.n, ranks, jnp.uint32(0xFFFFFFFF)) & ~_INDEX
    if capacity > int(_INDEX) + 1:
        return jnp.argsort(ranks, stable=True).astype(jnp.int32)
    # The same order from plain numbers, which sort several times as fast: the index rides along.
    return (jnp.sort(ranks | rows.astype(jnp.uint32)) & _INDEX).astype(jnp.int32)


_INDEX = np.uint32(2**10 - 1)
"""The bits of a rank that make room for an index; the others decide the order."""


def batch_in_order(
    data: ClientData, order: Int[Array, " capacity"], index: int | Count, batch_size: int
) -> Minibatch:
    """Batch number `index` of the epoch that visits the examples in `order`."""
    positions = index * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
    real = positions < data.n
    # A padded slot repeats the first example in order: its loss is as finite as a real one's, so
    # weight 0 removes it exactly, where zeros could give 0 · ∞.
    rows = order[jnp.where(real, positions, 0)]
    return Minibatch(_rows(data, rows), real.astype(jnp.float32))


def batch_with_replacement(data: ClientData, key: Key, batch_size: int) -> Minibatch:
    """`batch_size` examples drawn independently and uniformly."""
    rows = jax.random.randint(key, (batch_size,), 0, jnp.maximum(data.n, 1))
    real = jnp.broadcast_to(data.n > 0, (batch_size,))
    return Minibatch(_rows(data, rows), real.astype(jnp.float32))


def _rows(data: ClientData, rows: Int[Array, " b"]) -> Examples:
    return jax.tree.map(lambda array: array[rows], data.examples)


def sum_batches(
    function: Callable[[Count, Minibatch], Any], data: ClientData, batch_size: int
) -> Any:
    """Σ function(index, batch) over the client's examples in their order; memory is that of one."""
    order = jnp.arange(jax.tree.leaves(data.examples)[0].shape[0], dtype=jnp.int32)

    def of_batch(index: Count) -> Any:
        return function(index, batch_in_order(data, order, index, batch_size))

    shapes = jax.eval_shape(of_batch, jnp.zeros((), jnp.int32))
    return jax.lax.fori_loop(
        0,
        steps_per_epoch(data.n, batch_size),
        lambda index, sums: jax.tree.map(jnp.add, sums, of_batch(index)),
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    )
