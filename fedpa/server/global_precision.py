"""Eq. 3's denominator at the server: the averaged delta by the inverse of the averaged precision.

    A ← βA + (1 − β) Σ q_i A_i / Σ q_i          A_i = Z_i Z_iᵀ, or exactly X_iᵀX_i/n_i
    Ā = A (p + 1)/tr A
    D = ε (Ā + εI)⁻¹ Δ̄

for each layer, Δ̄ its averaged delta stacked as [b; W]. Directions that inputs don't reach keep gain
1, steep ones shrink; ε is in units of Ā's mean eigenvalue, 1. Large layers have a block-diagonal A.
What belongs to no layer that is seen keeps gain 1.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.objectives.input_factor import Blocks, Cut, cut_of, in_blocks
from fedpa.objectives.layer_inputs import Layer, stacked, unstacked
from fedpa.precision import accumulation_dtype
from fedpa.server.aggregation import all_finite
from fedpa.types import Params, Scalar

POWER_STEPS = 10
"""Of the estimate of the steepest direction."""


class Precision(NamedTuple):
    """What the server knows of the precision, layer by layer."""

    averaged: tuple[Blocks, ...]
    """A."""
    factors: tuple[Blocks, ...]
    """L of LLᵀ = Ā/ε + I, made anew when A changes and kept for the rounds between."""
    steepest: Float[Array, " layers"]
    """Ā's largest eigenvalue, about; the mean is 1."""


def init(layers: Sequence[Layer], theta: Params, largest: int) -> Precision:
    """A = 0: every direction has gain 1."""
    dtype = accumulation_dtype(jnp.result_type(*jax.tree.leaves(theta)))
    cuts = [cut_of(layer, largest) for layer in layers]
    zeros = tuple(jnp.zeros((n, size, size), dtype) for n, size in cuts)
    ones = tuple(jnp.broadcast_to(jnp.eye(size, dtype=dtype), (n, size, size)) for n, size in cuts)
    return Precision(zeros, ones, jnp.zeros(len(layers), dtype))


def update(
    precision: Precision,
    layers: Sequence[Layer],
    fresh: Sequence[Blocks],
    weight: Scalar,
    *,
    decay: float,
    epsilon: float,
) -> Precision:
    """A and its factors after a round whose clients sent what they see; unchanged if none did."""
    averaged = tuple(
        decay * a + (1 - decay) * b.astype(a.dtype)
        for a, b in zip(precision.averaged, fresh, strict=True)
    )
    bars = [normalized(a, layer.features) for a, layer in zip(averaged, layers, strict=True)]
    factors = tuple(factor(bar, epsilon) for bar in bars)
    new = Precision(averaged, factors, jnp.stack([_steepest(bar) for bar in bars]))
    ok = all_finite(new) & (weight > 0)
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, precision)


def normalized(blocks: Blocks, features: int) -> Blocks:
    """Ā, of mean eigenvalue 1; 0 if A is."""
    trace = jnp.sum(jnp.trace(blocks, axis1=1, axis2=2))
    return blocks * jnp.where(trace > 0, features / jnp.where(trace > 0, trace, 1), 0)


def factor(bar: Blocks, epsilon: float) -> Blocks:
    """L of LLᵀ = Ā/ε + I, by Cholesky."""
    shifted = bar / epsilon + jnp.eye(bar.shape[-1], dtype=bar.dtype)[None]
    return jnp.sqrt(shifted) if bar.shape[-1] == 1 else jnp.linalg.cholesky(shifted)


def preconditioned(precision: Precision, layers: Sequence[Layer], delta: Params) -> Params:
    """D, from Δ̄."""
    for layer, lower in zip(layers, precision.factors, strict=True):
        matrix = stacked(layer, delta)
        rows = in_blocks(matrix.astype(lower.dtype), Cut(*lower.shape[:2]))
        divided = _divided(rows, lower).reshape(-1, layer.outputs)[: layer.features]
        delta = unstacked(layer, divided.astype(matrix.dtype), delta)
    return delta


def _divided(rows: Float[Array, "blocks size r"], lower: Blocks) -> Float[Array, "blocks size r"]:
    """L⁻ᵀL⁻¹ times the rows."""
    if lower.shape[-1] == 1:
        return rows / lower**2
    solve = functools.partial(jax.lax.linalg.triangular_solve, lower, left_side=True, lower=True)
    return solve(solve(rows), transpose_a=True)


def _steepest(bar: Blocks) -> Scalar:
    """Ā's largest eigenvalue by a few steps of the power method: from below."""
    vector = jnp.ones((bar.shape[0], bar.shape[1], 1), bar.dtype)
    length = jnp.ones((bar.shape[0], 1, 1), bar.dtype)
    for _ in range(POWER_STEPS if bar.shape[-1] > 1 else 1):
        vector = bar @ (vector / jnp.where(length > 0, length, 1))
        length = jnp.linalg.norm(vector, axis=1, keepdims=True)
    return jnp.max(length)
