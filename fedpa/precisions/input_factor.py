"""A client's share of the precision: A_i = XᵀX/n of each layer's inputs, exactly or as a sketch.

    Z_i = XᵀΩ/√(n s),   Ω ∈ {±1}^{n×s} random,   E[Z_i Z_iᵀ] = XᵀX/n

X has a row for each example (each place of a convolution or a sentence) and a column for each row
of [b; W]; with s = r outputs, Z has the shape of [b; W]. A_i's diagonal blocks themselves, their
upper triangles, are sent where they are no more numbers than Z. They need no randomness and add up.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.objectives.client_data import ClientData
from fedpa.objectives.layer_inputs import Layer, Rows, Squares, layers_of, observe
from fedpa.objectives.minibatches import Minibatch, sum_batches
from fedpa.objectives.objective import Objective
from fedpa.precisions.kronecker import Cut, Factor, Kronecker, Sketch, cut, pack, split_rows
from fedpa.types import Count, Key, Params, Scalar

Rank = int | Literal["exact"] | None


def cut_layer(layer: Layer, largest: int) -> Cut:
    return cut(layer.features, 1 if layer.table else largest)


def columns(layer: Layer, rank: Rank, largest: int) -> int | None:
    """s of a layer's sketch; None where the blocks themselves are sent."""
    if rank == "exact":
        return None
    s = layer.outputs if rank is None else min(rank, layer.outputs)
    return None if cut_layer(layer, largest).num_numbers <= layer.features * s else s


def input_factors(
    objective: Objective,
    theta: Params,
    data: ClientData,
    key: Key,
    *,
    batch_size: int,
    rank: Rank,
    largest: int,
) -> tuple[Factor, ...]:
    """What a client sends of each layer at θ, from one pass over its examples in their order."""
    layers = layers_of(objective.loss, theta, data.examples)
    sketched = [columns(layer, rank, largest) for layer in layers]

    def of_batch(index: Count, batch: Minibatch) -> list[_Sums]:
        loss_key, *keys = jax.random.split(jax.random.fold_in(key, index), 1 + len(layers))
        seen = observe(objective.loss, theta, batch.examples, batch.weights, loss_key)
        return [
            _sums(seen[layer], s, cut_layer(layer, largest), k)
            for layer, s, k in zip(layers, sketched, keys, strict=True)
        ]

    totals = sum_batches(of_batch, data, batch_size)
    return tuple(_factor(total, s) for total, s in zip(totals, sketched, strict=True))


class _Sums(NamedTuple):
    value: Array
    """XᵀΩ, or the blocks of XᵀX."""
    n: Scalar


def _sums(seen: Rows | Squares, s: int | None, cut: Cut, key: Key) -> _Sums:
    if isinstance(seen, Squares):
        return _Sums(seen.sums[:, None, None], seen.n)
    n = jnp.sum(seen.real)
    if s is not None:  # rows that don't count are 0 in X
        return _Sums(seen.x.T @ signs(key, seen.x.shape[0], s, seen.x.dtype), n)
    x = split_rows(seen.x.T, cut)
    if cut.size == 1:
        return _Sums(jnp.sum(x**2, axis=2, keepdims=True), n)
    return _Sums(x @ x.swapaxes(1, 2), n)


def _factor(total: _Sums, s: int | None) -> Factor:
    n = jnp.maximum(total.n, 1)
    if s is not None:
        return Sketch(total.value / jnp.sqrt(n * s))
    return pack(Kronecker(total.value / n))


def signs(key: Key, n: int, s: int, dtype: Any) -> Float[Array, "n s"]:
    """Ω: independent ±1, from one random bit each."""
    words = jax.random.bits(key, (n, -(-s // 32)), jnp.uint32)
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    return 1 - 2 * bits.reshape(n, -1)[:, :s].astype(dtype)
