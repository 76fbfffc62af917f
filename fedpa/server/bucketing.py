"""Bucketing (Karimireddy et al. 2022)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpa.errors import check_integer, check_type
from fedpa.server.aggregation import Aggregation, Result, add_all, check_aggregation
from fedpa.server.keep_results import Present, Rows, keep_results
from fedpa.types import Key

SEED = 2022
"""Of the permutation."""


def bucketing(aggregation: Aggregation, size: int) -> Aggregation:
    """Aggregate the means of small groups of results, which differ less than single ones.

    Results are put into ⌈n/s⌉ buckets of s by a permutation, and the buckets' means aggregated
    (Karimireddy, He, Jaggi: Byzantine-robust learning on heterogeneous datasets via bucketing, ICLR
    2022, Algorithm 1). Honest clients with different data then differ less, by √s.

    One malicious client spoils a bucket: a share δ of malicious clients becomes a share of up to sδ
    of malicious buckets, which the aggregation must withstand. Give a smaller share or fewer
    clients than s times what it withstands.

    The permutation is the same in every round and on every engine: that of the results in the order
    of a fixed projection. It mixes them, but is not secret. Means are of equal weights; all results
    of a round are kept (`keep_results`).

    Args:
        aggregation: Of the buckets' means: `trimmed_mean(0.2)`.
        size: s ≥ 1; 2 is the authors' choice.
    Returns:
        The aggregation.
    Raises:
        FedpaError: s is out of range.
    Example:
        >>> import fedpa
        >>> robust = bucketing(fedpa.server.trimmed_mean(0.2), 2)  # withstands a share of 0.1
        >>> robust.least_clients
        9
    """
    check_type("aggregation", aggregation, Aggregation, "fedpa.server.trimmed_mean(0.2)")
    check_aggregation(aggregation)
    check_integer("size", size, 1)

    def combine(rows: Rows, present: Present) -> Result:
        buckets = jnp.arange(-(-len(present) // size))
        place = _permute(rows, present)
        is_in = (place[None] // size == buckets[:, None]) & present[None]
        counts = jnp.sum(is_in, axis=1).astype(jnp.float32)
        share = is_in.astype(jnp.float32) / jnp.maximum(counts, 1)[:, None]
        means = jax.tree.map(lambda x: jnp.tensordot(share.astype(x.dtype), x, axes=1), rows)
        return aggregation.value(add_all(aggregation, means, counts)[0]).mean

    least = size * (aggregation.least_clients - 1) + 1
    return keep_results(combine, least_clients=least)


def _permute(rows: Rows, present: Present) -> Int[Array, " rows"]:
    """The place of each row in a permutation of those that are present."""
    directions, numbers = jax.random.split(jax.random.key(SEED))
    place = jnp.arange(len(present))
    order = jnp.lexsort((_project(rows, directions), ~present))
    # One number for each place, whatever the number of rows.
    drawn = jax.vmap(lambda at: jax.random.uniform(jax.random.fold_in(numbers, at)))(place)
    shuffled = jnp.lexsort((drawn, place >= jnp.sum(present)))
    return jnp.zeros_like(place).at[order[shuffled]].set(place)


def _project(rows: Rows, key: Key) -> Float[Array, " rows"]:
    """A fixed random projection of each row, bounded so that it does not overflow."""
    total = jnp.zeros(jax.tree.leaves(rows)[0].shape[0])
    for number, x in enumerate(jax.tree.leaves(rows)):
        flat = jnp.arcsinh(x.reshape(x.shape[0], -1)).astype(total.dtype)
        own = jax.random.fold_in(key, number)
        total += flat @ jax.random.normal(own, flat.shape[1:], flat.dtype)
    return total
