"""The posterior delta by the paper's recurrence (appendix C): Sherman–Morrison, one sample a time.

With γ_t = ρ(t−1)/t, Σ̃_t = Σ̃_{t−1} + γ_t u_t u_tᵀ and Δ̃_t = Σ̃_t⁻¹(x₀ − x̄_t):

    u_t       = x_t − x̄_{t−1}
    v_{t−1,t} = u_t − Σ_{k=2}^{t−1} γ_k (v_{k−1,k}ᵀu_t) / (1 + γ_k v_{k−1,k}ᵀu_k) · v_{k−1,k}
    Δ̃_t       = Δ̃_{t−1} − (1/t + γ_t u_tᵀΔ̃_{t−1}) / (1 + γ_t u_tᵀv_{t−1,t}) · v_{t−1,t}
    Δ̂_t       = (1 + (t−1)ρ) Δ̃_t

(the second line of Δ̃ is the printed one, shortened; the recurrence runs on Δ̃ and the factor
1/ρ_t is applied once, on reading). What is stored are the v_{k−1,k} and the scalars u_kᵀv_{k−1,k}:
O(ℓd) memory, O(td) time per sample, and Δ̂_t can be read after each at O(d).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.deltas.delta import Delta, DeltaInfo, ravel, unravel
from fedpa.deltas.gram import effective_samples
from fedpa.types import Count, Params, Scalar


class RecurrenceState(NamedTuple):
    theta0: Params
    start: Float[Array, " d"]
    """θ₀ as one vector."""
    first: Float[Array, " d"]
    """x_1, from which means are measured: less is lost to rounding than with x̄ itself."""
    offset: Float[Array, " d"]
    """x̄_t − x_1."""
    delta: Float[Array, " d"]
    """Δ̃_t."""
    v: Float[Array, "l d"]
    """v_{k−1,k} in row k − 1; zero where not yet written."""
    uv: Float[Array, " l"]
    """γ_k u_kᵀv_{k−1,k}."""
    t: Scalar
    """Samples so far."""
    rho: Scalar
    scale: Scalar
    """Multiplies deviations from the mean."""
    last: Float[Array, " d"]
    """x_t."""
    steps: Scalar
    """Σ ‖x_{s+1} − x_s‖²."""
    spread: Scalar
    """Σ ‖x_s − x̄_t‖² = Σ (s−1)/s ‖u_s‖²."""


def recurrence(num_samples: int, rho: float, scale_of: Callable[[Count, Any], Scalar]) -> Delta:
    """Build the delta.

    Args:
        num_samples: ℓ, at most.
        rho: The shrinkage ρ.
        scale_of: (n_i, dtype) → what multiplies deviations from the mean.
    """

    def init(theta0: Params, n: Count) -> RecurrenceState:
        start = ravel(theta0)
        zeros, zero = jnp.zeros_like(start), jnp.zeros((), start.dtype)
        return RecurrenceState(
            theta0,
            start,
            first=zeros,
            offset=zeros,
            delta=zeros,
            v=jnp.zeros((num_samples, start.shape[0]), start.dtype),
            uv=jnp.zeros(num_samples, start.dtype),
            t=zero,
            rho=jnp.asarray(rho, start.dtype),
            scale=scale_of(n, start.dtype),
            last=zeros,
            steps=zero,
            spread=zero,
        )

    def update(state: RecurrenceState, theta_s: Params, theta_k: Params) -> RecurrenceState:
        """Take in x_t."""
        x, t = ravel(theta_s), state.t + 1
        is_first = state.t == 0
        first = jnp.where(is_first, x, state.first)
        u = (x - first) - state.offset
        k = jnp.arange(1, num_samples + 1, dtype=x.dtype)
        gamma = state.rho * state.scale**2 * (k - 1) / k
        v = u - _dot(gamma * _dot(state.v, u) / (1 + state.uv), state.v)
        gamma_t = state.rho * state.scale**2 * (t - 1) / t
        uv = gamma_t * _dot(u, v)
        step = (1 / t + gamma_t * _dot(u, state.delta)) / (1 + uv)
        row = t.astype(jnp.int32) - 1
        return state._replace(
            first=first,
            offset=state.offset + u / t,
            delta=jnp.where(is_first, state.start - x, state.delta - step * v),
            v=state.v.at[row].set(v),
            uv=state.uv.at[row].set(uv),
            t=t,
            last=x,
            steps=state.steps + jnp.where(is_first, 0, _dot(x - state.last, x - state.last)),
            spread=state.spread + (t - 1) / t * _dot(u, u),
        )

    def value(state: RecurrenceState) -> tuple[Params, DeltaInfo]:
        """Δ̂_t = (1 + (t−1)ρ) Δ̃_t."""
        delta = (1 + (state.t - 1) * state.rho) * state.delta
        ess = effective_samples(state.t, state.steps, state.spread)
        info = DeltaInfo(state.rho.astype(jnp.float32), ess.astype(jnp.float32))
        return unravel(delta, state.theta0, state.t <= num_samples), info

    return Delta(init, update, value)


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
