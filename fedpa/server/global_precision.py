"""Eq. 3's denominator at the server: the averaged delta by the inverse of the averaged precision.

    A ← βA + (1 − β) Σ q_i A_i / Σ q_i          A_i = Z_i Z_iᵀ, or exactly X_iᵀX_i/n_i
    Ā = A (p + 1)/tr A
    D = ε (Ā + εI)⁻¹ Δ̄

for each layer, Δ̄ its averaged delta stacked as [b; W]. Directions that inputs don't reach keep gain
1, steep ones shrink; ε is in units of Ā's mean eigenvalue, 1. Large layers have a block-diagonal A.
What belongs to no layer that is seen keeps gain 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpa.objectives.layer_inputs import Layer, stack_layer, unstack_layer
from fedpa.precision import accumulation_dtype, narrowed
from fedpa.precisions import kronecker
from fedpa.precisions.input_factor import cut_layer
from fedpa.precisions.kronecker import Cholesky, Factor, Kronecker
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, all_finite
from fedpa.types import Params, Scalar


class Precision(NamedTuple):
    """What the server knows of the precision, layer by layer."""

    averaged: tuple[Kronecker, ...]
    """A."""
    factors: tuple[Cholesky, ...]
    """Of Ā/ε + I: computed when A changes and kept for the rounds between."""
    steepest: Float[Array, " layers"]
    """Ā's largest eigenvalue, about; the mean is 1."""


def init(layers: Sequence[Layer], theta: Params, largest: int) -> Precision:
    """A = 0: every direction has gain 1."""
    dtype = accumulation_dtype(jnp.result_type(*jax.tree.leaves(theta)))
    zeros = tuple(kronecker.zeros(cut_layer(layer, largest), dtype) for layer in layers)
    ones = tuple(Cholesky(kronecker.add_identity(zero).blocks) for zero in zeros)
    return Precision(zeros, ones, jnp.zeros(len(layers), dtype))


def update(
    precision: Precision,
    layers: Sequence[Layer],
    fresh: Sequence[Kronecker],
    weight: Scalar,
    *,
    decay: float,
    epsilon: float,
) -> Precision:
    """A and its factors after a round whose clients sent what they see; unchanged if none did."""
    averaged = tuple(
        kronecker.add(kronecker.scale(a, decay), kronecker.scale(narrowed(b, a), 1 - decay))
        for a, b in zip(precision.averaged, fresh, strict=True)
    )
    bars = [
        kronecker.normalize(a, layer.features) for a, layer in zip(averaged, layers, strict=True)
    ]
    in_epsilons = [jax.tree.map(lambda a: a / epsilon, bar) for bar in bars]
    new = Precision(
        averaged,
        tuple(kronecker.factorize(kronecker.add_identity(bar)) for bar in in_epsilons),
        jnp.stack([kronecker.largest_eigenvalue(bar) for bar in bars]),
    )
    ok = all_finite(new) & (weight > 0)
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, precision)


def precondition(precision: Precision, layers: Sequence[Layer], delta: Params) -> Params:
    """D, from Δ̄."""
    for layer, factor in zip(layers, precision.factors, strict=True):
        divided = kronecker.solve(factor, stack_layer(layer, delta))
        delta = unstack_layer(layer, divided, delta)
    return delta


class Sent(NamedTuple):
    """What a client sends: its delta, and in some rounds what it sees of the precision."""

    delta: Result
    factors: tuple[Factor, ...]


class Mean(NamedTuple):
    delta: Result
    precision: tuple[Kronecker, ...]
    """Σ q_i A_i / Σ q_i of every layer; () in rounds without."""


class _Total(NamedTuple):
    deltas: Any
    precisions: tuple[Kronecker, ...]


def with_precision(deltas: Aggregation, largest: int) -> Aggregation:
    """Deltas as `deltas` adds them, and Σ q_i A_i: a sum as large as one A.

    Sketches become matrices, A_i = Z_i Z_iᵀ, as they are added. A client whose sketch is not finite
    is rejected with its delta.
    """

    def unpack(factors: tuple[Factor, ...]) -> tuple[Kronecker, ...]:
        return tuple(kronecker.unpack(factor, largest) for factor in factors)

    def init(result: Sent, weight: Weight) -> _Total:
        shapes = jax.eval_shape(unpack, result.factors)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return _Total(deltas.init(result.delta, weight), zeros)

    def add(total: _Total, result: Sent, weight: Weight) -> tuple[_Total, Bool[Array, ""]]:
        summed, accepted = deltas.add(total.deltas, result.delta, weight)
        own = unpack(result.factors)
        accepted = accepted & all_finite(own)
        q = jnp.asarray(weight, jnp.float32)
        sums = jax.tree.map(lambda s, a: s + q.astype(s.dtype) * a, total.precisions, own)
        new = _Total(summed, sums)
        return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), new, total), accepted

    def merge(one: _Total, other: _Total) -> _Total:
        sums = jax.tree.map(jnp.add, one.precisions, other.precisions)
        return _Total(deltas.merge(one.deltas, other.deltas), sums)

    def value(total: _Total) -> Aggregate:
        delta, weight = deltas.value(total.deltas)
        safe = jnp.where(weight > 0, weight, 1)
        means = jax.tree.map(lambda s: s / safe.astype(s.dtype), total.precisions)
        return Aggregate(Mean(delta, means), weight)

    return Aggregation(init, add, merge, value)
