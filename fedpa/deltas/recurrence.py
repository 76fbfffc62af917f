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

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.types import Scalar


class RecurrenceState(NamedTuple):
    theta0: Float[Array, " d"]
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


def init(theta0: Float[Array, " d"], capacity: int, rho: float, scale: Scalar) -> RecurrenceState:
    zeros = jnp.zeros_like(theta0)
    return RecurrenceState(
        theta0,
        first=zeros,
        offset=zeros,
        delta=zeros,
        v=jnp.zeros((capacity, theta0.shape[0]), theta0.dtype),
        uv=jnp.zeros(capacity, theta0.dtype),
        t=jnp.zeros((), theta0.dtype),
        rho=jnp.asarray(rho, theta0.dtype),
        scale=scale.astype(theta0.dtype),
        last=zeros,
        steps=jnp.zeros((), theta0.dtype),
        spread=jnp.zeros((), theta0.dtype),
    )


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def update(state: RecurrenceState, x: Float[Array, " d"]) -> RecurrenceState:
    """Take in x_t."""
    capacity = state.v.shape[0]
    t = state.t + 1
    is_first = state.t == 0
    first = jnp.where(is_first, x, state.first)
    u = (x - first) - state.offset

    k = jnp.arange(1, capacity + 1, dtype=x.dtype)
    gamma = state.rho * state.scale**2 * (k - 1) / k
    v = u - _dot(gamma * _dot(state.v, u) / (1 + state.uv), state.v)
    gamma_t = state.rho * state.scale**2 * (t - 1) / t
    uv = gamma_t * _dot(u, v)
    step = (1 / t + gamma_t * _dot(u, state.delta)) / (1 + uv)
    row = t.astype(jnp.int32) - 1
    return state._replace(
        first=first,
        offset=state.offset + u / t,
        delta=jnp.where(is_first, state.theta0 - x, state.delta - step * v),
        v=state.v.at[row].set(v),
        uv=state.uv.at[row].set(uv),
        t=t,
        last=x,
        steps=state.steps + jnp.where(is_first, 0, _dot(x - state.last, x - state.last)),
        spread=state.spread + (t - 1) / t * _dot(u, u),
    )


def value(state: RecurrenceState) -> Float[Array, " d"]:
    """Δ̂_t = (1 + (t−1)ρ) Δ̃_t."""
    return (1 + (state.t - 1) * state.rho) * state.delta
