"""Aggregations that need all results of a round at once, as sums: the sum is the stack of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpa.precision import accumulation_dtype
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, all_finite

Rows = Result
"""Clients' results, stacked on axis 0."""
Present = Bool[Array, " rows"]
"""Whether a row is a client's: not one of padding, rejected or empty."""


FAR, SCALE = 2.0**48, 2.0**66
"""Rows beyond `FAR`, or below its inverse, are scaled."""


class Kept(NamedTuple):
    """What has been sent so far, one row per client; the weights of absent rows are 0."""

    results: Rows
    weights: Weight


def keep_results(
    combine: Callable[[Rows, Present], Result], *, least_clients: int = 1
) -> Aggregation:
    """Make an aggregation from a function of all results of a round.

    Memory is that of all results of a round in at least float32, and during the round's end about
    three times that. A run that does not fit is refused in its first round, before clients run.

    Args:
        combine: (results stacked on axis 0, whether each row is a client's) → what the server is
            given in place of their mean. Rows that are no client's are zeros; at least one row is a
            client's.
        least_clients: With fewer results a round leaves the model unchanged, ≥ 1 (default: 1).
    Returns:
        The aggregation. Weights only say which rows count: those whose weights are all above 0.
    Example:
        >>> import fedpa, jax, jax.numpy as jnp
        >>> def largest(rows, present):
        ...     return jax.tree.map(lambda x: jnp.max(x, axis=0), rows)
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=keep_results(largest))
    """

    def init(result: Result, weight: Weight) -> Kept:
        def empty(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), _dtype(x)), tree)

        return Kept(empty(result), empty(weight))

    def add(total: Kept, result: Result, weight: Weight) -> tuple[Kept, Bool[Array, ""]]:
        positive = [jnp.all(w >= 0) for w in jax.tree.leaves(weight)]
        accepted = all_finite((result, weight)) & jnp.all(jnp.stack(positive))

        def row(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.where(accepted, x, 0).astype(_dtype(x))[None], tree)

        return merge(total, Kept(row(result), row(weight))), accepted

    def value(total: Kept) -> Aggregate:
        if not jax.tree.leaves(total.weights)[0].shape[0]:
            total = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), total)
        there = jnp.stack([q > 0 for q in jax.tree.leaves(total.weights)])
        present = jnp.all(there, axis=0)
        enough = jnp.sum(present) >= least_clients
        # Without a client, a row stands for one: nothing is divided by 0.
        row = jnp.arange(len(present)) == 0
        found = combine(total.results, jnp.where(enough, present, present | row))
        result = jax.tree.map(lambda x: jnp.where(enough, x, 0), found)
        weight = jax.tree.map(
            lambda q: jnp.where(enough, jnp.sum(jnp.where(present, q, 0)), 0), total.weights
        )
        return Aggregate(result, weight)

    def merge(one: Kept, other: Kept) -> Kept:
        both: Kept = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), one, other)
        return both

    return Aggregation(init, add, merge, value, is_weighted=False, least_clients=least_clients)


def _dtype(x: Any) -> Any:
    return accumulation_dtype(x.dtype)


def row_norms(rows: Rows) -> Float[Array, " rows"]:
    """The norm of each row over all its arrays.

    Huge and tiny rows are scaled by a power of two, so that squares neither overflow nor vanish.
    Dividing by the largest entry would not do: 1/3e38 is flushed to 0.
    """
    flat = [x.reshape(x.shape[0], -1) for x in jax.tree.leaves(rows) if x.size]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), axis=1) for x in flat]), axis=0)
    scale = jnp.where(largest > FAR, 1 / SCALE, jnp.where(largest < 1 / FAR, SCALE, 1))
    scale = scale.astype(largest.dtype)
    squares = [jnp.sum((x * scale[:, None]) ** 2, axis=1) for x in flat]
    return jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0)) / scale


def distances(rows: Rows, center: Result) -> Float[Array, " rows"]:
    """The distance of each row to a center, over all its arrays."""
    return row_norms(jax.tree.map(lambda x, c: x - c[None], rows, center))


def mix_rows(shares: Float[Array, " rows"], rows: Rows) -> Result:
    """Σ_i shares_i row_i."""
    return jax.tree.map(lambda x: jnp.tensordot(shares.astype(x.dtype), x, axes=1), rows)


def median_of(values: Float[Array, " rows"], present: Present) -> Float[Array, ""]:
    """The lower median of those present."""
    ordered = jnp.sort(jnp.where(present, values, jnp.inf))
    return ordered[(jnp.sum(present) - 1) // 2]
