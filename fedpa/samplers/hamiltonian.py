"""Chains of Metropolis-adjusted transitions over all of a client's data: what HMC and NUTS share.

The density is that of the posterior at temperature T, log p_i(θ) = −(n_i/T) f_i(θ), so these are
exact where mini-batch samplers are approximate, at the price of full gradients. A random loss
(dropout) is fixed by one key per chain: the density must be a function.

The integrator's step size is ε = √(ηT/n_i) for a learning rate η: a leapfrog step then moves θ by
(η/2)∇f_i, whatever the temperature, and is stable for ηλ < 4, λ the largest curvature of f_i.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedpa.errors import check_type, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from fedpa.precision import narrow, widen
from fedpa.samplers.sampler import (
    Rate,
    Sampler,
    Steps,
    Window,
    check_rate,
    check_temperature,
    check_window,
    import_blackjax,
    relative_temperature,
)
from fedpa.types import Count, Key, Params, Scalar

LEAST_ADAPTATION = 20
"""Transitions below which dual averaging, which begins with large steps, does harm."""

HMCState = Any
"""blackjax's: position, log-density and its gradient."""
Kernel = Callable[[Key, HMCState, Any, Scalar, jax.Array, int], tuple[HMCState, Any]]
"""blackjax's: (key, state, log density, ε, inverse mass, extent) → (state, its info)."""


class HamiltonianState(NamedTuple):
    chain: HMCState
    """θ as one vector, at least float32, with its log density and gradient."""
    theta: Params
    """The same as the caller knows it."""
    step_size: Scalar
    """ε."""
    loss_key: Key
    """Of a random loss: the same for the whole chain."""
    key: Key


class HamiltonianInfo(NamedTuple):
    loss: Scalar
    """f_i(θ_s)."""
    acceptance: Scalar
    """Mean acceptance probability of the transitions that made the sample."""
    divergent: Count
    """How many of them diverged."""
    gradients: Count
    """Gradients of the full loss they took."""


def hamiltonian(
    objective: Objective,
    kernel: Kernel,
    extent: int,
    learning_rate: Rate,
    window: Window,
    temperature: Any,
    target_acceptance: float | None,
) -> Sampler:
    """The sampler that makes transitions by `kernel`.

    extent: how far a transition may go, in the kernel's own terms.
    window: `Epochs(B)` is one transition per sample after B of burn-in; `Steps(K, B, discard)`
        K + discard transitions per sample.
    target_acceptance: adapt ε to it in the burn-in, by dual averaging; None keeps ε as given.
    """
    check_type("objective", objective, Objective, "fedpa.Objective(loss)")
    check_rate(learning_rate)
    warmth = check_temperature(temperature)
    check_window(window)
    if target_acceptance is not None:
        if not 0 < target_acceptance < 1:
            raise refuse("target_acceptance", target_acceptance, "must be between 0 and 1")
        if window.burn_in < LEAST_ADAPTATION:
            raise refuse(
                "target_acceptance",
                target_acceptance,
                f"needs a burn-in of at least {LEAST_ADAPTATION} transitions to adapt the step "
                f"size in, not {window.burn_in}",
            )
    thinning = window.per_sample + window.discard if isinstance(window, Steps) else 1

    def log_density(theta0: Params, data: ClientData, loss_key: Key) -> Callable[[Any], Scalar]:
        relative = relative_temperature(warmth, data.n)

        def density(flat: jax.Array) -> Scalar:
            loss = client_loss(objective, _restore(flat, theta0), data, loss_key)
            return -loss.astype(flat.dtype) / relative.astype(flat.dtype)

        return density

    def move(state: HamiltonianState, data: ClientData) -> tuple[HamiltonianState, HamiltonianInfo]:
        key, step_key = jax.random.split(state.key)
        density = log_density(state.theta, data, state.loss_key)
        mass = jnp.ones_like(state.chain.position)
        chain, info = kernel(step_key, state.chain, density, state.step_size, mass, extent)
        # No data, no posterior: an empty client stays at θ₀.
        chain = jax.tree.map(lambda new, old: jnp.where(data.n > 0, new, old), chain, state.chain)
        loss = -chain.logdensity.astype(jnp.float32) * relative_temperature(warmth, data.n)
        shown = HamiltonianInfo(
            loss,
            jnp.asarray(info.acceptance_rate, jnp.float32),
            jnp.asarray(info.is_divergent, jnp.int32),
            jnp.asarray(info.num_integration_steps, jnp.int32),
        )
        theta = _restore(chain.position, state.theta)
        return state._replace(chain=chain, theta=theta, key=key), shown

    def init(theta0: Params, data: ClientData, key: Key) -> HamiltonianState:
        loss_key, chain_key = jax.random.split(key)
        wide, _ = ravel_pytree(widen(theta0))
        chain = import_blackjax("mcmc.hmc").init(wide, log_density(theta0, data, loss_key))
        step_size = jnp.sqrt(
            jnp.asarray(learning_rate, jnp.float32) * relative_temperature(warmth, data.n)
        )
        state = HamiltonianState(chain, theta0, step_size.astype(wide.dtype), loss_key, chain_key)
        return warm_up(state, data) if window.burn_in else state

    def warm_up(state: HamiltonianState, data: ClientData) -> HamiltonianState:
        if target_acceptance is None:
            state = jax.lax.fori_loop(0, window.burn_in, lambda _, s: move(s, data)[0], state)
            return state
        averaging = import_blackjax("adaptation.step_size").dual_averaging_adaptation
        start, adapt, final = averaging(target_acceptance)
        dtype = state.step_size.dtype

        def body(_: Any, carry: tuple[HamiltonianState, Any]) -> tuple[HamiltonianState, Any]:
            state, averages = carry
            state, info = move(state, data)
            averages = adapt(averages, info.acceptance)
            return state._replace(step_size=jnp.exp(averages.log_step_size).astype(dtype)), averages

        carry = (state, start(state.step_size.astype(jnp.float32)))
        state, averages = jax.lax.fori_loop(0, window.burn_in, body, carry)
        return state._replace(step_size=final(averages).astype(dtype))

    def sample(
        state: HamiltonianState, data: ClientData
    ) -> tuple[HamiltonianState, Params, HamiltonianInfo]:
        state, infos = jax.lax.scan(lambda s, _: move(s, data), state, None, length=thinning)
        info = HamiltonianInfo(
            infos.loss[-1],
            jnp.mean(infos.acceptance),
            jnp.sum(infos.divergent),
            jnp.sum(infos.gradients),
        )
        return state, state.theta, info

    return Sampler(init, sample, lambda state: state.theta, warmth)


def _restore(flat: jax.Array, theta: Params) -> Params:
    """The vector in θ's structure and dtypes."""
    _, unravel = ravel_pytree(widen(theta))
    return narrow(unravel(flat), theta)
