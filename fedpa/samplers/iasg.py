"""IASG, iterate-averaged stochastic gradient (Algorithm 4; Mandt et al. 2017).

    burn-in:   θ ← ClientOpt(θ, ∇̂f_i(θ))                           B times
    sample s:  θ ← ClientOpt(θ, ∇̂f_i(θ)), S ← S ∪ {θ}              K times
               θ_s ← average of S

IASG has no temperature: the spread of its samples follows from learning rate, batch size and
window. Around an optimum with Hessian A, with gradients whose noise has covariance C, independent
from step to step, plain SGD with rate η is an AR(1) process in every eigendirection of A. If C
commutes with A, eigenvalues λ and c, φ = 1 − ηλ, the average of K stationary iterates has variance

    v/K · [(1 + φ)/(1 − φ) − 2φ(1 − φᴷ) / (K(1 − φ)²)],   v = η²c / (1 − φ²),

which tends to (1/K) A⁻¹CA⁻¹ once K ≫ 1/(ηλ): `averaged_covariance` computes it. For a well-
specified likelihood C ≈ A/b at batch size b, so that one-epoch windows (K = n/b) tend to A⁻¹/n, the
posterior at T = 1, and fall short of it when windows are shorter than the mixing time. Reshuffled
epochs make the noise within an epoch cancel, and the spread much smaller still.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedpa.errors import refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.minibatches import (
    Minibatch,
    batch_in_order,
    batch_with_replacement,
    check_order,
    epoch_order,
    steps_per_epoch,
)
from fedpa.objectives.objective import Objective, minibatch_loss
from fedpa.precision import narrowed, widened
from fedpa.samplers.sampler import Sampler
from fedpa.types import Count, Key, Params, Scalar


class Epochs(NamedTuple):
    """One sample per epoch, as in the paper's experiments."""

    burn_in: int = 0
    """In-round burn-in: epochs before the first sample."""


class Steps(NamedTuple):
    """Algorithm 4 by steps; the order of examples runs on across samples."""

    per_sample: int
    """K: iterates averaged into one sample."""
    burn_in: int = 0
    """B: steps before the first sample."""
    discard: int = 0
    """Steps dropped before each sample's K, to make samples less correlated."""


class IASGState(NamedTuple):
    theta: Params
    optimizer: optax.OptState
    """ClientOpt's state, carried across epochs and samples."""
    key: Key
    steps: Count
    """Steps made so far."""
    epoch: Count
    """Epochs begun so far."""
    order: Int[Array, " capacity"]
    """The order in which the current epoch visits the examples."""
    position: Count
    """Batches of the current epoch already used; 0 means that a new epoch is due."""


class IASGInfo(NamedTuple):
    loss: Scalar
    """Mean of the mini-batch losses met while making the sample."""
    steps: Count
    """Iterates averaged into the sample."""


class _Average(NamedTuple):
    """Running means: memory does not grow with the number of steps."""

    theta: Params
    loss: Scalar
    steps: Count


def iasg(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    window: Epochs | Steps = Epochs(),
    order: str = "shuffle",
    average: bool = True,
) -> Sampler:
    """Build the sampler.

    optimizer: ClientOpt, any optax transformation.
    window: what makes a sample, and the burn-in before the first.
    order: reshuffled epochs or independent draws with replacement.
    average: False returns the last iterate of each window instead of their average: local SGD as
        FedAvg runs it (Algorithm 2).
    """
    if batch_size < 1:
        raise refuse("batch_size", batch_size, "must be at least 1")
    _check(window)
    check_order(order)

    def sgd_step(state: IASGState, batch: Minibatch) -> tuple[IASGState, Scalar]:
        key = jax.random.fold_in(jax.random.fold_in(state.key, 1), state.steps)
        loss, gradient = jax.value_and_grad(minibatch_loss, argnums=1)(
            objective, state.theta, batch, key
        )
        updates, opt_state = optimizer.update(gradient, state.optimizer, state.theta)
        theta = optax.apply_updates(state.theta, updates)
        return state._replace(theta=theta, optimizer=opt_state, steps=state.steps + 1), loss

    def next_batch(state: IASGState, data: ClientData, index: Any) -> Minibatch:
        if order == "replacement":
            key = jax.random.fold_in(jax.random.fold_in(state.key, 2), state.steps)
            return batch_with_replacement(data, key, batch_size)
        return batch_in_order(data, state.order, index, batch_size)

    def begin_epoch(state: IASGState, data: ClientData) -> IASGState:
        if order == "shuffle":
            key = jax.random.fold_in(jax.random.fold_in(state.key, 3), state.epoch)
            state = state._replace(order=epoch_order(data, key))
        return state._replace(epoch=state.epoch + 1)

    def accumulate(mean: _Average, theta: Params, loss: Scalar) -> _Average:
        steps = mean.steps + 1
        if average:
            averaged = jax.tree.map(
                lambda m, x: m + (x.astype(m.dtype) - m) / steps.astype(m.dtype), mean.theta, theta
            )
        else:
            averaged = mean.theta
        change = (loss.astype(jnp.float32) - mean.loss) / steps.astype(jnp.float32)
        return _Average(averaged, mean.loss + change, steps)

    def run_epoch(state: IASGState, data: ClientData) -> tuple[IASGState, _Average]:
        def body(index: Any, carry: tuple[IASGState, _Average]) -> tuple[IASGState, _Average]:
            state, mean = carry
            state, loss = sgd_step(state, next_batch(state, data, index))
            return state, accumulate(mean, state.theta, loss)

        carry = (begin_epoch(state, data), _start(state.theta))
        return jax.lax.fori_loop(0, steps_per_epoch(data.n, batch_size), body, carry)

    def run_steps(state: IASGState, data: ClientData, num: int) -> tuple[IASGState, _Average]:
        epoch_length = jnp.maximum(steps_per_epoch(data.n, batch_size), 1)

        def body(_: Any, carry: tuple[IASGState, _Average]) -> tuple[IASGState, _Average]:
            state, mean = carry
            state = jax.lax.cond(
                state.position == 0, lambda s: begin_epoch(s, data), lambda s: s, state
            )
            state, loss = sgd_step(state, next_batch(state, data, state.position))
            state = state._replace(position=(state.position + 1) % epoch_length)
            return state, accumulate(mean, state.theta, loss)

        trips = jnp.where(data.n > 0, num, 0)
        return jax.lax.fori_loop(0, trips, body, (state, _start(state.theta)))

    def init(theta0: Params, data: ClientData, key: Key) -> IASGState:
        capacity = jax.tree.leaves(data.examples)[0].shape[0]
        zero = jnp.zeros((), jnp.int32)
        state = IASGState(
            theta0,
            optimizer.init(theta0),
            key,
            steps=zero,
            epoch=zero,
            order=jnp.zeros(capacity, jnp.int32),
            position=zero,
        )
        if isinstance(window, Steps):
            return run_steps(state, data, window.burn_in)[0] if window.burn_in else state
        if window.burn_in:
            state = jax.lax.fori_loop(0, window.burn_in, lambda _, s: run_epoch(s, data)[0], state)
        return state

    def sample(state: IASGState, data: ClientData) -> tuple[IASGState, Params, IASGInfo]:
        if isinstance(window, Steps):
            if window.discard:
                state, _ = run_steps(state, data, window.discard)
            state, mean = run_steps(state, data, window.per_sample)
        else:
            state, mean = run_epoch(state, data)
        theta_s = narrowed(mean.theta, state.theta) if average else state.theta
        return state, theta_s, IASGInfo(mean.loss, mean.steps)

    return Sampler(init, sample, lambda state: state.theta)


def _start(theta: Params) -> _Average:
    # Before any step the average is θ itself: an empty client's sample is θ₀, its delta 0.
    return _Average(widened(theta), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def _check(window: Epochs | Steps) -> None:
    if isinstance(window, Steps) and window.per_sample < 1:
        raise refuse("steps_per_sample", window.per_sample, "must be at least 1")
    if window.burn_in < 0:
        raise refuse("burn_in", window.burn_in, "must be at least 0")
    if isinstance(window, Steps) and window.discard < 0:
        raise refuse("discard_steps", window.discard, "must be at least 0")


def averaged_covariance(
    hessian: Float[Array, "d d"],
    noise: Float[Array, "d d"],
    learning_rate: float,
    per_sample: int,
) -> Float[Array, "d d"]:
    """The covariance that theory gives IASG samples (formula above); `noise` C commutes with A."""
    curvature, basis = jnp.linalg.eigh(hessian)
    c = jnp.diagonal(basis.T @ noise @ basis)
    phi = 1 - learning_rate * curvature
    iterate = learning_rate**2 * c / (1 - phi**2)
    k = per_sample
    averaged = iterate / k * ((1 + phi) / (1 - phi) - 2 * phi * (1 - phi**k) / (k * (1 - phi) ** 2))
    return (basis * averaged[None, :]) @ basis.T
