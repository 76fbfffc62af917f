"""The control without covariance: Δ = θ₀ − x̄, FedPA's delta at ρ = 0."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.types import Count, Params


class MeanState(NamedTuple):
    theta0: Params
    mean: Params
    """x̄_t."""
    t: Count


def mean() -> Delta:
    def init(theta0: Params, n: Count) -> MeanState:
        return MeanState(theta0, theta0, jnp.zeros((), jnp.int32))

    def update(state: MeanState, theta_s: Params, theta_k: Params) -> MeanState:
        t = state.t + 1
        averaged = jax.tree.map(lambda m, x: m + (x - m) / t.astype(x.dtype), state.mean, theta_s)
        return MeanState(state.theta0, averaged, t)

    def value(state: MeanState) -> tuple[Params, DeltaInfo]:
        return optax.tree.sub(state.theta0, state.mean), DeltaInfo(jnp.zeros(()))

    return Delta(init, update, value)
