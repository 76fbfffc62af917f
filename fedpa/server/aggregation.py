"""Aggregation, Algorithm 1 line 8: Σ q_i Δ_i / Σ q_i, as a running sum over the clients.

Client weights q_i are the examples of one epoch (not times the epochs), or one each.
(Printed with 1/|S|, which is right only for weights that average to 1.) Memory is that of one
result however many clients there are. A client whose result or weight is not finite, or whose
weight is negative, is rejected: it enters with weight 0 and is counted.

Robust aggregations, each in a file of its own, bound what a client that lies can do to the mean.
Some of them need all results of a round at once: `keep_results`.
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
    round. All four are traced by JAX: shapes must not depend on values. A sum may grow: the shapes
    of `merge` follow from those of its two sums.

    Args:
        init: Arrays (or their shapes) of one result and weight → empty sum.
        add: (sum, result, weight) → (sum, accepted).
        merge: Two partial sums into one, for engines that sum in several places.
        value: The sum → what the server is given.
        is_weighted: Whether a client with more weight counts more (default: True).
        least_clients: With fewer results it can't keep its promise: a run with smaller cohorts is
            refused, and a round with fewer usable results leaves the model unchanged (default: 1).
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
    is_weighted: bool = True
    least_clients: int = 1


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


def add_all(
    aggregation: Aggregation, results: Result, weights: Weight
) -> tuple[PyTree, Bool[Array, " m"]]:
    """Sum clients' results: a sum for each, merged pairwise.

    Args:
        aggregation: How they are summed.
        results: The clients' results, stacked on axis 0.
        weights: Their weights, stacked.
    Returns:
        The sum, and whether each client's result was accepted.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> mean = fedpa.server.weighted_mean()
        >>> total, accepted = add_all(mean, jnp.asarray([1.0, jnp.nan, 4.0]), jnp.ones(3))
        >>> float(mean.value(total).mean), accepted.tolist()
        (2.5, [True, False, True])
    """

    def add_one(result: Result, weight: Weight) -> tuple[PyTree, Bool[Array, ""]]:
        return aggregation.add(aggregation.init(result, weight), result, weight)

    totals, accepted = jax.vmap(add_one)(results, weights)
    return merge_pairwise(aggregation, totals), accepted


def merge_pairwise(aggregation: Aggregation, totals: PyTree) -> PyTree:
    """Merge sums stacked on axis 0: halves onto halves until one is left."""
    width = jax.tree.leaves(totals)[0].shape[0]
    if width == 1:
        return jax.tree.map(lambda x: x[0], totals)
    half = width // 2
    merged = jax.vmap(aggregation.merge)(
        jax.tree.map(lambda x: x[:half], totals),
        jax.tree.map(lambda x: x[half : 2 * half], totals),
    )
    whole = merge_pairwise(aggregation, merged)
    if width % 2 == 0:
        return whole
    return aggregation.merge(whole, jax.tree.map(lambda x: x[-1], totals))


def shape_of_sum(aggregation: Aggregation, one: PyTree, clients: int) -> PyTree:
    """The shapes of the sum of a number of clients, from those of one client's sum."""
    if clients <= 1:
        return one
    halves = (shape_of_sum(aggregation, one, n) for n in (clients // 2, clients - clients // 2))
    return jax.eval_shape(aggregation.merge, *halves)


def check_cohort(aggregation: Aggregation, field: str, results: int) -> None:
    """Refuse rounds with fewer results than the aggregation needs; `field` is their number."""
    least = aggregation.least_clients
    if results < least:
        raise refuse(
            field, results, f"the server's aggregation needs at least {least} results in a round"
        )


def sum_on_node(aggregation: Aggregation) -> Aggregation:
    """How a node sums its own clients: others than means get each node's weighted mean."""
    return aggregation if is_mean(aggregation) else weighted_mean()


def sum_of_node(aggregation: Aggregation, part: PyTree) -> PyTree:
    """A node's sum as one of the server's: the node is one result, unless all are averaged."""
    if is_mean(aggregation):
        return part
    mean, weight = sum_on_node(aggregation).value(part)
    return aggregation.add(aggregation.init(mean, weight), mean, weight)[0]


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
