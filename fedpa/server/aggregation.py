"""Aggregation, Algorithm 1 line 8: Σ q_i Δ_i / Σ q_i, as a running sum over the clients.

Client weights q_i are the examples of one epoch (not times the epochs), or one each.
(Printed with 1/|S|, which is right only for weights that average to 1.) Memory is that of one
result however many clients there are. A client whose result or weight is not finite, or whose
weight is negative, is rejected: it enters with weight 0 and is counted.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedpa.errors import refuse
from fedpa.precision import accumulation_dtype
from fedpa.types import Count, Scalar

Result = Any
"""What a client sends: a pytree of arrays of the algorithm's own choosing."""

Weight = Any
"""A number, or a tree prefix of the result: each subtree is then averaged by its own weight."""


class Aggregate(NamedTuple):
    """What the server is given."""

    mean: Result
    weight: Weight
    """Σ q_i."""


class Aggregation(NamedTuple):
    init: Callable[[Result, Weight], Any]
    """Arrays (or their shapes) of one result and weight → empty sum."""
    add: Callable[[Any, Result, Weight], tuple[Any, Bool[Array, ""]]]
    """(sum, result, weight) → (sum, accepted)."""
    merge: Callable[[Any, Any], Any]
    """Two partial sums into one, for engines that sum in several places."""
    value: Callable[[Any], Aggregate]


def weighted_mean() -> Aggregation:
    """Σ q_i Δ_i / Σ q_i; 0 where no client had a positive weight."""

    def init(result: Result, weight: Weight) -> Aggregate:
        def zeros(tree: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), tree)

        return Aggregate(zeros(result), zeros(weight))

    def add(total: Aggregate, result: Result, weight: Weight) -> tuple[Aggregate, Bool[Array, ""]]:
        positive = [jnp.all(w >= 0) for w in jax.tree.leaves(weight)]
        accepted = all_finite((result, weight)) & jnp.all(jnp.stack(positive))

        def add_subtree(q: Array, sums: Result, values: Result) -> Result:
            # Not q·0: zero times a non-finite value is not zero.
            return jax.tree.map(
                lambda s, x: (
                    s
                    + jnp.where(accepted, q.astype(s.dtype) * x.astype(s.dtype), 0).astype(s.dtype)
                ),
                sums,
                values,
            )

        sums = jax.tree.map(add_subtree, weight, total.mean, result)
        weights = jax.tree.map(lambda s, q: s + jnp.where(accepted, q, 0), total.weight, weight)
        return Aggregate(sums, weights), accepted

    def merge(one: Aggregate, other: Aggregate) -> Aggregate:
        return jax.tree.map(jnp.add, one, other)

    def value(total: Aggregate) -> Aggregate:
        def divide(q: Array, sums: Result) -> Result:
            safe = jnp.where(q > 0, q, 1)
            return jax.tree.map(lambda s: s / safe.astype(s.dtype), sums)

        return Aggregate(jax.tree.map(divide, total.weight, total.mean), total.weight)

    return Aggregation(init, add, merge, value)


def client_weight(weighting: str, n: Count) -> Scalar:
    """q_i = n_i or 1; 0 for an empty client either way."""
    if weighting == "examples":
        return n.astype(jnp.float32)
    return (n > 0).astype(jnp.float32)


def total_weight(weighting: str, sizes: Iterable[int]) -> float:
    """Σ q_i over clients of these sizes."""
    return float(sum(n if weighting == "examples" else n > 0 for n in sizes))


def check_weighting(weighting: str) -> None:
    if weighting not in ("examples", "uniform"):
        raise refuse("weighting", weighting, "must be 'examples' or 'uniform'")


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every floating-point number in the tree is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    return jnp.all(jnp.stack(flags)) if flags else jnp.asarray(True)
