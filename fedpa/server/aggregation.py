"""Aggregation, Algorithm 1 line 8: Σ q_i Δ_i / Σ q_i, as a running sum over the clients.

Client weights q_i are the examples of one epoch (not times the epochs), or one each.
(Printed with 1/|S|, which is right only for weights that average to 1.) Memory is that of one
result however many clients there are. A client whose result or weight is not finite, or whose
weight is negative, is rejected: it enters with weight 0 and is counted.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from fedpa.errors import check_type, refuse
from fedpa.precision import accumulation_dtype
from fedpa.types import Count, Scalar

Result: TypeAlias = PyTree
"""What a client sends: a pytree of arrays of the algorithm's own choosing."""

Weight: TypeAlias = PyTree
"""A number, or a tree prefix of the result: each subtree is then averaged by its own weight."""

Weighting = Literal["examples", "uniform"]
"""Client weights q_i: n_i, the examples of one epoch, or 1."""


class Aggregate(NamedTuple):
    """What the server is given of a round's clients.

    Args:
        mean: Σ q_i Δ_i / Σ q_i, or what a robust aggregation has in its place.
        weight: Σ q_i.
    Example:
        >>> import jax.numpy as jnp
        >>> from fedpa.server import Aggregate
        >>> aggregate = Aggregate(mean=jnp.zeros(3), weight=jnp.asarray(20.0))
    """

    mean: Result
    weight: Weight


class Aggregation(NamedTuple):
    """How clients' results become one: a running sum, which may be kept in several places.

    Engines call `init` and `add` where clients run, `merge` for partial sums, `value` once a
    round. All four are traced by JAX: shapes must not depend on values.

    Args:
        init: Arrays (or their shapes) of one result and weight → empty sum.
        add: (sum, result, weight) → (sum, accepted).
        merge: Two partial sums into one, for engines that sum in several places.
        value: The sum → what the server is given.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> mean = fedpa.server.weighted_mean()
        >>> total = mean.init(jnp.zeros(2), jnp.zeros(()))
        >>> for delta, weight in [(jnp.ones(2), 1.0), (jnp.zeros(2), 3.0)]:
        ...     total, accepted = mean.add(total, delta, jnp.asarray(weight))
        >>> float(mean.value(total).mean[0])
        0.25
    """

    init: Callable[[Result, Weight], PyTree]
    add: Callable[[PyTree, Result, Weight], tuple[PyTree, Bool[Array, ""]]]
    merge: Callable[[PyTree, PyTree], PyTree]
    value: Callable[[PyTree], Aggregate]


def weighted_mean() -> Aggregation:
    """Average results by their weights: Σ q_i Δ_i / Σ q_i; 0 where no client has a positive weight.

    A client whose result or weight is not finite, or whose weight is negative, is rejected.

    Returns:
        The aggregation.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=fedpa.server.weighted_mean())
    """
    return Aggregation(_init, _add, _merge, _value)


def _init(result: Result, weight: Weight) -> Aggregate:
    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), tree)

    return Aggregate(zeros(result), zeros(weight))


def _add(total: Aggregate, result: Result, weight: Weight) -> tuple[Aggregate, Bool[Array, ""]]:
    positive = [jnp.all(w >= 0) for w in jax.tree.leaves(weight)]
    accepted = all_finite((result, weight)) & jnp.all(jnp.stack(positive))

    def add_subtree(q: Array, sums: Result, values: Result) -> Result:
        # Not q·0: zero times a non-finite value is not zero.
        return jax.tree.map(
            lambda s, x: (
                s + jnp.where(accepted, q.astype(s.dtype) * x.astype(s.dtype), 0).astype(s.dtype)
            ),
            sums,
            values,
        )

    sums = jax.tree.map(add_subtree, weight, total.mean, result)
    weights = jax.tree.map(lambda s, q: s + jnp.where(accepted, q, 0), total.weight, weight)
    return Aggregate(sums, weights), accepted


def _merge(one: Aggregate, other: Aggregate) -> Aggregate:
    both: Aggregate = jax.tree.map(jnp.add, one, other)
    return both


def _value(total: Aggregate) -> Aggregate:
    def divide(q: Array, sums: Result) -> Result:
        safe = jnp.where(q > 0, q, 1)
        return jax.tree.map(lambda s: s / safe.astype(s.dtype), sums)

    return Aggregate(jax.tree.map(divide, total.weight, total.mean), total.weight)


def is_mean(aggregation: Aggregation) -> bool:
    """Whether it is the weighted mean, perhaps of what it makes of each result before it adds it.

    Its sum is then `Aggregate(Σ q_i r_i, Σ q_i)`.
    """
    return (aggregation.merge, aggregation.value) == (_merge, _value)


def client_weight(weighting: Weighting, n: Count) -> Scalar:
    """Weigh a client: q_i = n_i or 1; 0 for an empty client either way.

    Args:
        weighting: `examples` or `uniform`.
        n: n_i, the client's number of examples.
    Returns:
        q_i.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> float(fedpa.server.client_weight("examples", jnp.asarray(20)))
        20.0
    """
    if weighting == "examples":
        return n.astype(jnp.float32)
    return (n > 0).astype(jnp.float32)


def total_weight(weighting: Weighting, sizes: Iterable[int]) -> float:
    """Σ q_i over clients of these sizes."""
    return float(sum(n if weighting == "examples" else n > 0 for n in sizes))


def check_aggregation(aggregation: Any) -> None:
    """Refuse what is no `Aggregation`, and one whose functions answer in another form."""
    check_type("aggregation", aggregation, Aggregation, "fedpa.server.weighted_mean()")
    result, weight = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    try:
        total: Any = jax.eval_shape(aggregation.init, result, weight)
        added: Any = jax.eval_shape(aggregation.add, total, result, weight)
        value = jax.eval_shape(aggregation.value, total)
    except Exception:  # it may be made for results of another structure
        return
    structure: Any = jax.tree.structure(total)
    if type(added) is not tuple or len(added) != 2 or jax.tree.structure(added[0]) != structure:
        raise refuse("aggregation.add's answer", added, "must be (total, accepted)")
    if not isinstance(value, Aggregate):
        raise refuse("aggregation.value's answer", value, "must be fedpa.server.Aggregate(…)")


def check_weighting(weighting: str) -> None:
    if weighting not in get_args(Weighting):
        raise refuse("weighting", weighting, "must be 'examples' or 'uniform'")


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Whether every floating-point number in the tree is finite."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    flags = [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
    return jnp.all(jnp.stack(flags)) if flags else jnp.asarray(True)
