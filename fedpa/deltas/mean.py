"""The control without covariance: Δ = θ₀ − x̄, FedPA's delta at ρ = 0."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.precision import narrowed, widened
from fedpa.types import Count, Params


class MeanState(NamedTuple):
    theta0: Params
    mean: Params
    """x̄_t."""
    t: Count


def mean() -> Delta:
    def init(theta0: Params, n: Count) -> MeanState:
        return MeanState(theta0, widened(theta0), jnp.zeros((), jnp.int32))

    def update(state: MeanState, theta_s: Params, theta_k: Params) -> MeanState:
        t = state.t + 1
        averaged = jax.tree.map(
            lambda m, x: m + (x.astype(m.dtype) - m) / t.astype(m.dtype), state.mean, theta_s
        )
        return MeanState(state.theta0, averaged, t)

    def value(state: MeanState) -> tuple[Params, DeltaInfo]:
        delta = optax.tree.sub(widened(state.theta0), state.mean)
        return narrowed(delta, state.theta0), DeltaInfo(jnp.zeros(()))

    return Delta(init, update, value)
