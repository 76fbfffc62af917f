"""Chains of Metropolis-adjusted transitions over all of a client's data: what HMC and NUTS share.

The density is that of the posterior at temperature T, log p_i(θ) = −(n_i/T) f_i(θ), so these are
exact where mini-batch samplers are approximate, at the price of full gradients. A random loss
(dropout) is fixed by one key per chain: the density must be a function.

The integrator's step size is ε, or √(ηT/n_i) for a learning rate η: a leapfrog step then moves θ by
(η/2)∇f_i, whatever the temperature, and is stable for ηλ < 4, λ the largest curvature of f_i.

A mass matrix M is a change of coordinates: θ = c + Lx with M⁻¹ = LLᵀ, and unit mass for x. That is
the same chain (Neal 2011, section 5.4.1), and L is factored once instead of at every transition. If
it is adapted, the burn-in is divided into windows as Stan's is: the first and the last adapt ε
alone; those between double in length, and each ends with L ← L·chol(covariance of the window's x).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.errors import FedpaError, check_type, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from fedpa.precision import ravel
from fedpa.samplers.sampler import (
    Sampler,
    Steps,
    Window,
    check_positive,
    check_temperature,
    check_window,
    import_blackjax,
    relative_temperature,
)
from fedpa.types import Count, Key, Params, Scalar

LEAST_ADAPTATION = 20
"""Transitions below which dual averaging, which begins with large steps, does harm."""
LEAST_MASS_ADAPTATION = 120
"""Transitions below which the mass would be estimated from a single short window."""
TARGET_ACCEPTANCE = 0.8
"""Stan's; where ε must be adapted and no other is given."""
DRAWS_PER_PARAMETER = 2
"""A window of fewer draws of each parameter estimates variances, but no correlations."""
RIDGE = 1e-5
"""Added to a window's covariance, relative to its mean variance: factors exist in float32."""

Mass: TypeAlias = Literal["diagonal", "dense"] | jax.Array | np.ndarray | None
"""How M⁻¹ is found: None for the identity, adapted in the burn-in, or given as (d,) or (d, d)."""

HMCState = Any
"""blackjax's: position, log-density and its gradient."""
Kernel = Callable[[Key, HMCState, Any, Scalar, jax.Array, int], tuple[HMCState, Any]]
"""blackjax's: (key, state, log density, ε, inverse mass, extent) → (state, its info)."""


class Frame(NamedTuple):
    """Coordinates x with θ = c + Lx, in which the mass is one."""

    center: Float[Array, " d"]
    factor: Float[Array, " d"] | Float[Array, "d d"]
    """L; its diagonal, if it has nothing else."""


class Moments(NamedTuple):
    """Welford's running moments of a window's positions."""

    number: Scalar
    mean: Float[Array, " d"]
    scatter: Float[Array, " d"] | Float[Array, "d d"]
    """Σ (x − x̄)(x − x̄)ᵀ, or its diagonal."""


class HamiltonianState(NamedTuple):
    chain: HMCState
    """θ as one vector, at least float32, in the frame, with its log density and gradient."""
    theta: Params
    """The same as the caller knows it."""
    step_size: Scalar
    """ε."""
    frame: Frame | None
    """The mass; None for the identity."""
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
    *,
    learning_rate: Any,
    step_size: Any,
    mass: Any,
    window: Window,
    temperature: Any,
    target_acceptance: float | None,
) -> Sampler:
    """The sampler that makes transitions by `kernel`.

    extent: how far a transition may go, in the kernel's own terms.
    window: `Epochs(B)` is one transition per sample after B of burn-in; `Steps(K, B, discard)`
        K + discard transitions per sample.
    target_acceptance: adapt ε to it in the burn-in, by dual averaging; None keeps ε as given, and
        is 0.8 where there is none to keep.
    """
    check_type("objective", objective, Objective, "fedpa.Objective(loss)")
    warmth = check_temperature(temperature)
    check_window(window)
    _check_mass(mass, window)
    _check_step_size(learning_rate, step_size, mass, window)
    is_adapting_mass = isinstance(mass, str)
    is_given = learning_rate is not None or step_size is not None
    if target_acceptance is None and (is_adapting_mass or not is_given):
        target_acceptance = TARGET_ACCEPTANCE
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

    def log_density(
        theta: Params, frame: Frame | None, data: ClientData, loss_key: Key
    ) -> Callable[[Any], Scalar]:
        relative = relative_temperature(warmth, data.n)

        def density(position: jax.Array) -> Scalar:
            loss = client_loss(objective, _restore(_leave(frame, position), theta), data, loss_key)
            return -loss.astype(position.dtype) / relative.astype(position.dtype)

        return density

    def move(state: HamiltonianState, data: ClientData) -> tuple[HamiltonianState, HamiltonianInfo]:
        key, step_key = jax.random.split(state.key)
        density = log_density(state.theta, state.frame, data, state.loss_key)
        unit = jnp.ones_like(state.chain.position)
        chain, info = kernel(step_key, state.chain, density, state.step_size, unit, extent)
        # No data, no posterior: an empty client stays at θ₀.
        chain = jax.tree.map(lambda new, old: jnp.where(data.n > 0, new, old), chain, state.chain)
        loss = -chain.logdensity.astype(jnp.float32) * relative_temperature(warmth, data.n)
        shown = HamiltonianInfo(
            loss,
            jnp.asarray(info.acceptance_rate, jnp.float32),
            jnp.asarray(info.is_divergent, jnp.int32),
            jnp.asarray(info.num_integration_steps, jnp.int32),
        )
        theta = _restore(_leave(state.frame, chain.position), state.theta)
        return state._replace(chain=chain, theta=theta, key=key), shown

    def init(theta0: Params, data: ClientData, key: Key) -> HamiltonianState:
        loss_key, chain_key = jax.random.split(key)
        wide, _ = ravel(theta0)
        frame = _first_frame(mass, wide)
        position = wide if frame is None else jnp.zeros_like(wide)
        density = log_density(theta0, frame, data, loss_key)
        chain = import_blackjax("mcmc.hmc").init(position, density)
        if learning_rate is None:
            epsilon = jnp.asarray(1.0 if step_size is None else step_size, jnp.float32)
        else:
            epsilon = jnp.sqrt(
                jnp.asarray(learning_rate, jnp.float32) * relative_temperature(warmth, data.n)
            )
        state = HamiltonianState(
            chain, theta0, epsilon.astype(wide.dtype), frame, loss_key, chain_key
        )
        return warm_up(state, data) if window.burn_in else state

    def warm_up(state: HamiltonianState, data: ClientData) -> HamiltonianState:
        if target_acceptance is None:
            state = jax.lax.fori_loop(0, window.burn_in, lambda _, s: move(s, data)[0], state)
            return state
        if is_adapting_mass:
            return adapt_mass(state, data)
        state = state if is_given else search_step_size(state, data)
        return adapt_step_size(state, data, window.burn_in, ())[0]

    def adapt_step_size(
        state: HamiltonianState, data: ClientData, length: Any, moments: Any
    ) -> tuple[HamiltonianState, Any]:
        """Dual averaging over as many transitions; the moments see the positions, if not ()."""
        averaging = import_blackjax("adaptation.step_size").dual_averaging_adaptation
        start, adapt, final = averaging(target_acceptance)
        dtype = state.step_size.dtype

        def body(_: Any, carry: Any) -> Any:
            state, averages, moments = carry
            state, info = move(state, data)
            averages = adapt(averages, info.acceptance)
            state = state._replace(step_size=jnp.exp(averages.log_step_size).astype(dtype))
            return state, averages, _add(moments, state.chain.position) if moments else ()

        carry = (state, start(state.step_size.astype(jnp.float32)), moments)
        state, averages, moments = jax.lax.fori_loop(0, length, body, carry)
        return state._replace(step_size=final(averages).astype(dtype)), moments

    def search_step_size(state: HamiltonianState, data: ClientData) -> HamiltonianState:
        """ε doubled or halved until one leapfrog step's acceptance crosses 0.65."""
        key, search_key = jax.random.split(state.key)
        density = log_density(state.theta, state.frame, data, state.loss_key)
        leapfrog = import_blackjax("mcmc.hmc").build_kernel()
        unit = jnp.ones_like(state.chain.position)
        # From infinity, where a flat density leads, blackjax would halve for ever.
        start = jnp.clip(jnp.nan_to_num(state.step_size, nan=1.0), 1e-10, 1e10)
        with jax.numpy_dtype_promotion("standard"):  # blackjax relies on it
            found = import_blackjax("adaptation.step_size").find_reasonable_step_size(
                search_key,
                lambda epsilon: lambda k, chain: leapfrog(k, chain, density, epsilon, unit, 1),
                state.chain,
                start,
            )
        return state._replace(step_size=found, key=key)

    def adapt_mass(state: HamiltonianState, data: ClientData) -> HamiltonianState:
        lengths = mass_windows(window.burn_in)
        size = state.chain.position.size
        if mass == "dense" and max(lengths[1:-1]) < DRAWS_PER_PARAMETER * size:
            raise refuse(
                "mass",
                mass,
                f"the longest window of a burn-in of {window.burn_in} has {max(lengths[1:-1])} "
                f"draws, but {size} parameters need {DRAWS_PER_PARAMETER * size}: lengthen the "
                "burn-in, or take 'diagonal'",
            )

        def reframe(state: HamiltonianState, moments: Moments) -> HamiltonianState:
            assert state.frame is not None
            center = _leave(state.frame, state.chain.position)
            frame = Frame(center, _next_factor(state.frame.factor, moments))
            density = log_density(state.theta, frame, data, state.loss_key)
            chain = import_blackjax("mcmc.hmc").init(jnp.zeros_like(center), density)
            return state._replace(chain=chain, frame=frame)

        def adapt(state: HamiltonianState, plan: Any) -> tuple[HamiltonianState, None]:
            length, is_slow = plan
            assert state.frame is not None
            nothing = Moments(
                jnp.zeros((), state.frame.center.dtype),
                jnp.zeros_like(state.frame.center),
                jnp.zeros_like(state.frame.factor),
            )
            state = search_step_size(state, data)
            state, moments = adapt_step_size(state, data, length, nothing)
            return jax.lax.cond(is_slow, reframe, lambda s, _: s, state, moments), None

        slow = [False, *[True] * (len(lengths) - 2), False]
        plan = (jnp.asarray(lengths, jnp.int32), jnp.asarray(slow))
        state, _ = jax.lax.scan(adapt, state, plan)
        return state

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


def mass_windows(burn_in: int) -> list[int]:
    """The burn-in's windows: a fast one, slow ones from 25 on, each twice as long, a fast one."""
    first, last = min(75, 15 * burn_in // 100), min(50, 20 * burn_in // 100)
    slow, length, left = [], 25, burn_in - first - last
    while left >= 3 * length:  # the next would fit, too
        slow.append(length)
        left, length = left - length, 2 * length
    return [first, *slow, left, last]


def _add(moments: Moments, x: jax.Array) -> Moments:
    number = moments.number + 1
    before = x - moments.mean
    mean = moments.mean + before / number
    product = jnp.outer(before, x - mean) if moments.scatter.ndim == 2 else before * (x - mean)
    return Moments(number, mean, moments.scatter + product)


def _next_factor(factor: jax.Array, moments: Moments) -> jax.Array:
    """L·chol(covariance of the window's x); L itself where the chain did not move."""
    covariance = moments.scatter / (moments.number - 1)
    is_dense = covariance.ndim == 2
    variances = jnp.diag(covariance) if is_dense else covariance
    is_usable = jnp.all(jnp.isfinite(covariance)) & jnp.all(variances > 0)
    if is_dense:
        enough = moments.number >= DRAWS_PER_PARAMETER * len(variances)
        covariance = jnp.where(enough, covariance, jnp.diag(variances))
        covariance = covariance + RIDGE * jnp.mean(variances) * jnp.eye(
            len(variances), dtype=factor.dtype
        )
        found = factor @ _cholesky(covariance)
    else:
        found = factor * jnp.sqrt(variances)
    chosen: jax.Array = jnp.where(is_usable & jnp.all(jnp.isfinite(found)), found, factor)
    return chosen


_one_by_one: Callable[[Any], Any] = jax.custom_batching.sequential_vmap


@_one_by_one
def _cholesky(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """L with LLᵀ the matrix. Vectorized, one after the other: see `fedpa.deltas.gram`."""
    factor: jax.Array = jnp.linalg.cholesky(matrix)
    return factor


def _first_frame(mass: Mass, theta: Float[Array, " d"]) -> Frame | None:
    if mass is None:
        return None
    if isinstance(mass, str):
        ones = jnp.ones_like(theta)
        return Frame(theta, ones if mass == "diagonal" else jnp.diag(ones))
    if mass.shape not in {(theta.size,), (theta.size,) * 2}:
        raise FedpaError(
            f"mass has shape {mass.shape}: for {theta.size} parameters it must be "
            f"({theta.size},) or ({theta.size}, {theta.size})"
        )
    inverse = jnp.asarray(mass).astype(theta.dtype)
    return Frame(theta, jnp.sqrt(inverse) if inverse.ndim == 1 else _cholesky(inverse))


def _leave(frame: Frame | None, position: Float[Array, " d"]) -> Float[Array, " d"]:
    """The vector θ at this position in the frame."""
    if frame is None:
        return position
    moved = frame.factor @ position if frame.factor.ndim == 2 else frame.factor * position
    return frame.center + moved


def _check_mass(mass: Any, window: Window) -> None:
    if mass is None:
        return
    expected = (
        "must be None, 'diagonal', 'dense' or an inverse mass matrix: an array of the d expected "
        "variances, or the d × d expected covariance"
    )
    if isinstance(mass, str):
        if mass not in ("diagonal", "dense"):
            raise refuse("mass", mass, expected)
        if window.burn_in < LEAST_MASS_ADAPTATION:
            raise refuse(
                "mass",
                mass,
                f"needs a burn-in of at least {LEAST_MASS_ADAPTATION} transitions to adapt the "
                f"mass in, not {window.burn_in}",
            )
        return
    is_array = isinstance(mass, jax.Array | np.ndarray)
    if not is_array or mass.ndim not in (1, 2) or len(set(mass.shape)) != 1:
        raise refuse("mass", mass, expected)
    if isinstance(mass, jax.core.Tracer):
        return  # inside a compiled function: there are no values to check
    values = np.asarray(mass, np.float64)
    if values.ndim == 1:
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise refuse("mass", mass, "must have finite variances > 0")
        return
    is_symmetric = np.isfinite(values).all() and np.allclose(
        values, values.T, rtol=1e-4, atol=1e-6 * np.abs(values).max()
    )
    if not is_symmetric or np.linalg.eigvalsh(values)[0] <= 0:
        raise refuse("mass", mass, "must be a finite, symmetric, positive definite matrix")


def _check_step_size(learning_rate: Any, step_size: Any, mass: Any, window: Window) -> None:
    if learning_rate is not None and step_size is not None:
        raise refuse(
            "step_size", step_size, f"learning_rate = {learning_rate} sets it, too: give one"
        )
    for field, value in [("learning_rate", learning_rate), ("step_size", step_size)]:
        if value is not None and not isinstance(value, jax.Array):
            check_positive(field, value, "must be a finite number > 0")
    if learning_rate is not None and mass is not None and not isinstance(mass, str):
        raise refuse(
            "learning_rate",
            learning_rate,
            "sets the step size for the identity mass; with a given mass give step_size",
        )
    if learning_rate is None and step_size is None and window.burn_in < LEAST_ADAPTATION:
        raise refuse(
            "step_size",
            None,
            f"must be given, unless a burn-in of at least {LEAST_ADAPTATION} transitions (not "
            f"{window.burn_in}) adapts it",
        )


def _restore(flat: jax.Array, theta: Params) -> Params:
    """The vector in θ's structure and dtypes."""
    return ravel(theta)[1](flat)
