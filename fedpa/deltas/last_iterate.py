"""FedAvg's delta (Algorithm 2): Δ = θ₀ − θ_K, the last iterate of local SGD."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.types import Count, Params


class LastIterateState(NamedTuple):
    theta0: Params
    theta_k: Params


def last_iterate() -> Delta:
    """Build FedAvg's delta Δ = θ₀ − θ_K, the total step of local SGD (Algorithm 2).

    Returns:
        The delta; its info has ρ = 0 and ess = 0: samples are not used.
    Example:
        >>> delta = last_iterate()
        >>> state = delta.init(jnp.ones(2), jnp.asarray(10))
        >>> state = delta.update(state, theta_s=jnp.ones(2), theta_k=jnp.zeros(2))
        >>> print(delta.value(state)[0])
        [1. 1.]
    """

    def init(theta0: Params, n: Count) -> LastIterateState:
        return LastIterateState(theta0, theta0)

    def update(state: LastIterateState, theta_s: Params, theta_k: Params) -> LastIterateState:
        return state._replace(theta_k=theta_k)

    def value(state: LastIterateState) -> tuple[Params, DeltaInfo]:
        return optax.tree.sub(state.theta0, state.theta_k), DeltaInfo(jnp.zeros(()), jnp.zeros(()))

    return Delta(init, update, value)
