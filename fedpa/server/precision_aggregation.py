"""Σ q_i A_i beside Σ q_i Δ_i: sketches become matrices, A_i = Z_i Z_iᵀ, as they are added.

The sum is as large as one A however many clients there are. A client whose sketch is not finite is
rejected with its delta.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedpa.objectives.input_factor import Blocks, Factor, blocks_of
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, all_finite


class Sent(NamedTuple):
    """What a client sends: its delta, and in some rounds what it sees of the precision."""

    delta: Result
    factors: tuple[Factor, ...]


class Mean(NamedTuple):
    delta: Result
    precision: tuple[Blocks, ...]
    """Σ q_i A_i / Σ q_i of every layer; () in rounds without."""


class _Total(NamedTuple):
    deltas: Any
    blocks: tuple[Blocks, ...]


def with_precision(deltas: Aggregation, largest: int) -> Aggregation:
    """Deltas as `deltas` adds them, and Σ q_i Z_i Z_iᵀ: a sum whose size is that of one A."""

    def matrices(factors: tuple[Factor, ...]) -> tuple[Blocks, ...]:
        return tuple(blocks_of(factor, largest) for factor in factors)

    def init(result: Sent, weight: Weight) -> _Total:
        shapes = jax.eval_shape(matrices, result.factors)
        zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in shapes)
        return _Total(deltas.init(result.delta, weight), zeros)

    def add(total: _Total, result: Sent, weight: Weight) -> tuple[_Total, Bool[Array, ""]]:
        summed, accepted = deltas.add(total.deltas, result.delta, weight)
        own = matrices(result.factors)
        accepted = accepted & all_finite(own)
        q = jnp.asarray(weight, jnp.float32)
        blocks = tuple(s + q.astype(s.dtype) * a for s, a in zip(total.blocks, own, strict=True))
        new = _Total(summed, blocks)
        return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, total), accepted

    def merge(one: _Total, other: _Total) -> _Total:
        blocks = jax.tree.map(jnp.add, one.blocks, other.blocks)
        return _Total(deltas.merge(one.deltas, other.deltas), blocks)

    def value(total: _Total) -> Aggregate:
        delta, weight = deltas.value(total.deltas)
        safe = jnp.where(weight > 0, weight, 1)
        blocks = tuple(s / safe.astype(s.dtype) for s in total.blocks)
        return Aggregate(Mean(delta, blocks), weight)

    return Aggregation(init, add, merge, value)
