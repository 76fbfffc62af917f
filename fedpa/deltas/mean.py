"""The control without covariance: Δ = c (θ₀ − x̄), FedPA's delta at Ŝ = 0."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.deltas.gram import effective_samples
from fedpa.errors import check_positive
from fedpa.precision import narrow, widen
from fedpa.types import Count, Params, Scalar


class MeanState(NamedTuple):
    theta0: Params
    mean: Params
    """x̄_t."""
    t: Count
    last: Params
    """x_t."""
    steps: Scalar
    """Σ ‖x_{s+1} − x_s‖²."""
    spread: Scalar
    """Σ ‖x_s − x̄_t‖²."""


def mean(scale: float = 1.0) -> Delta:
    """Build the control without covariance: Δ = c (θ₀ − x̄).

    FedPA's delta has c = 1 at ρ = 0 (Σ̂ = I), and c = 1 + (ℓ−1)ρ if its ℓ samples are equal (Ŝ = 0).

    Args:
        scale: c > 0; default: 1.
    Returns:
        The delta; its info has ρ = 0 and the effective sample size.
    Example:
        >>> delta = mean()
        >>> state = delta.init(jnp.zeros(2), jnp.asarray(10))
        >>> for x in (1.0, 3.0):
        ...     state = delta.update(state, jnp.full(2, x), jnp.full(2, x))
        >>> print(delta.value(state)[0])
        [-2. -2.]
    """
    check_positive("scale", scale)

    def init(theta0: Params, n: Count) -> MeanState:
        wide, zero = widen(theta0), jnp.zeros(())
        return MeanState(theta0, wide, jnp.zeros((), jnp.int32), wide, zero, zero)

    def update(state: MeanState, theta_s: Params, theta_k: Params) -> MeanState:
        t, x = state.t + 1, widen(theta_s)
        u = optax.tree.sub(x, state.mean)
        averaged = jax.tree.map(lambda m, u: m + u / t.astype(m.dtype), state.mean, u)
        share = 1 - 1 / t.astype(jnp.float32)  # 0 for the first sample, which is no step
        step = jnp.where(t > 1, _square_norm(optax.tree.sub(x, state.last)), 0)
        return MeanState(
            state.theta0, averaged, t, x, state.steps + step, state.spread + share * _square_norm(u)
        )

    def value(state: MeanState) -> tuple[Params, DeltaInfo]:
        delta = optax.tree.sub(widen(state.theta0), state.mean)
        if scale != 1:
            delta = jax.tree.map(lambda x: scale * x, delta)
        ess = effective_samples(state.t.astype(jnp.float32), state.steps, state.spread)
        return narrow(delta, state.theta0), DeltaInfo(jnp.zeros(()), ess)

    return Delta(init, update, value)


def _square_norm(tree: Params) -> Scalar:
    squared: Scalar = optax.tree.norm(tree, squared=True).astype(jnp.float32)
    return squared
