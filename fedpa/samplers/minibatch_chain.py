"""Chains that stream over a client's mini-batches: what IASG, SGLD and SGHMC have in common.

A step is all that they differ in. The chain visits the mini-batches in order, counts steps and
epochs, and makes a sample of every window: the average of the window's iterates, or its last.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpa.errors import check_integer, check_type, refuse
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
from fedpa.samplers.temperature import Temperature
from fedpa.types import Count, Key, Params, Scalar
from fedpa.watching import watch


class Epochs(NamedTuple):
    """One sample per epoch, as in the paper's experiments."""

    burn_in: int = 0
    """In-round burn-in: epochs before the first sample."""


class Steps(NamedTuple):
    """Algorithm 4 by steps; the order of examples runs on across samples."""

    per_sample: int
    """K: iterates that make one sample."""
    burn_in: int = 0
    """B: steps before the first sample."""
    discard: int = 0
    """Steps dropped before each sample's K, to make samples less correlated."""


Window = Epochs | Steps
Memory = Any
"""What a step carries along beside θ: ClientOpt's state, a momentum, or nothing."""
Kept = Any
"""What is kept of a window's iterates: their running mean, for one."""
Gradient = Callable[[Params], tuple[Scalar, Params]]
"""θ → (f̂, ∇f̂): mini-batch loss and gradient at θ."""


class Step(NamedTuple):
    init: Callable[[Params, Count, Key], Memory]
    """(θ₀, n_i, key) → memory."""
    apply: Callable[[Params, Memory, Gradient, Count, Key], tuple[Params, Memory, Scalar]]
    """(θ, memory, gradient, n_i, key) → (θ, memory, f̂)."""


class ChainState(NamedTuple):
    theta: Params
    memory: Memory
    """Carried across epochs and samples."""
    key: Key
    steps: Count
    """Steps made so far."""
    epoch: Count
    """Epochs begun so far."""
    order: Int[Array, " capacity"]
    """The order in which the current epoch visits the examples."""
    position: Count
    """Batches of the current epoch already used; 0 means that a new epoch is due."""


class ChainInfo(NamedTuple):
    loss: Scalar
    """Mean of the mini-batch losses met while making the sample."""
    steps: Count
    """Steps made for the sample."""


class StepKeys(NamedTuple):
    loss: Key
    step: Key


class Walk(NamedTuple):
    """How a chain moves, and what it keeps of its iterates to make a sample of them."""

    start: Callable[[Params], Kept]
    """θ before a window's first step → what is kept of no iterates."""
    move: Callable[
        [Params, Memory, Kept, Count, Minibatch, Count, StepKeys],
        tuple[Params, Memory, Kept, Scalar],
    ]
    """(θ, memory, kept, k, mini-batch, n_i, keys) → (θ, memory, kept, f̂): a window's k-th step."""
    sample: Callable[[Params, Kept, Count], Params]
    """(θ_K, kept, K) → θ_s."""


class _Window(NamedTuple):
    """Sums and means, never lists: memory does not grow with the number of steps."""

    kept: Kept
    loss: Scalar
    """The mean loss so far."""
    steps: Count


def minibatch_chain(
    objective: Objective,
    step: Step,
    *,
    batch_size: int,
    window: Window,
    order: str,
    average: bool,
    temperature: Temperature | None = None,
    shortcut: Callable[[Params], Walk | None] = lambda theta: None,
) -> Sampler:
    """The sampler that makes `step` on every mini-batch.

    average: a sample is the average of its window's iterates; False: the last of them.
    temperature: T of the posterior that the steps sample, if they have one.
    shortcut: a faster walk to the same samples, if there is one for parameters like θ.
    """
    check_type("objective", objective, Objective, "fedpa.Objective(loss)")
    check_integer("batch_size", batch_size, 1)
    check_window(window)
    check_order(order)

    def walk_at(theta: Params) -> Walk:
        return shortcut(theta) or plain_walk(objective, step, average)

    def advance(
        walk: Walk, state: ChainState, made: _Window, data: ClientData, batch: Minibatch
    ) -> tuple[ChainState, _Window]:
        steps = made.steps + 1
        keys = StepKeys(_stream(state, _LOSS), _stream(state, _STEP))
        theta, memory, kept, loss = walk.move(
            state.theta, state.memory, made.kept, steps, batch, data.n, keys
        )
        watch(state.steps, loss=loss, theta=theta)
        state = state._replace(theta=theta, memory=memory, steps=state.steps + 1)
        change = (loss.astype(jnp.float32) - made.loss) / steps.astype(jnp.float32)
        return state, _Window(kept, made.loss + change, steps)

    def next_batch(state: ChainState, data: ClientData, index: Any) -> Minibatch:
        if order == "replacement":
            return batch_with_replacement(data, _stream(state, _BATCH), batch_size)
        return batch_in_order(data, state.order, index, batch_size)

    def begin_epoch(state: ChainState, data: ClientData) -> ChainState:
        if order == "shuffle":
            key = jax.random.fold_in(jax.random.fold_in(state.key, _ORDER), state.epoch)
            state = state._replace(order=epoch_order(data, key))
        return state._replace(epoch=state.epoch + 1)

    def run_epoch(walk: Walk, state: ChainState, data: ClientData) -> tuple[ChainState, _Window]:
        def body(index: Any, carry: tuple[ChainState, _Window]) -> tuple[ChainState, _Window]:
            state, made = carry
            return advance(walk, state, made, data, next_batch(state, data, index))

        carry = (begin_epoch(state, data), _start(walk, state.theta))
        return jax.lax.fori_loop(0, steps_per_epoch(data.n, batch_size), body, carry)

    def run_steps(
        walk: Walk, state: ChainState, data: ClientData, num: int
    ) -> tuple[ChainState, _Window]:
        epoch_length = jnp.maximum(steps_per_epoch(data.n, batch_size), 1)

        def body(_: Any, carry: tuple[ChainState, _Window]) -> tuple[ChainState, _Window]:
            state, made = carry
            state = jax.lax.cond(
                state.position == 0, lambda s: begin_epoch(s, data), lambda s: s, state
            )
            batch = next_batch(state, data, state.position)
            state, made = advance(walk, state, made, data, batch)
            return state._replace(position=(state.position + 1) % epoch_length), made

        trips = jnp.where(data.n > 0, num, 0)
        return jax.lax.fori_loop(0, trips, body, (state, _start(walk, state.theta)))

    def init(theta0: Params, data: ClientData, key: Key) -> ChainState:
        capacity = jax.tree.leaves(data.examples)[0].shape[0]
        zero = jnp.zeros((), jnp.int32)
        state = ChainState(
            theta0,
            step.init(theta0, data.n, jax.random.fold_in(key, _START)),
            key,
            steps=zero,
            epoch=zero,
            order=jnp.zeros(capacity, jnp.int32),
            position=zero,
        )
        walk = walk_at(theta0)
        if isinstance(window, Steps):
            return run_steps(walk, state, data, window.burn_in)[0] if window.burn_in else state
        if window.burn_in:
            state = jax.lax.fori_loop(
                0, window.burn_in, lambda _, s: run_epoch(walk, s, data)[0], state
            )
        return state

    def sample(state: ChainState, data: ClientData) -> tuple[ChainState, Params, ChainInfo]:
        walk = walk_at(state.theta)
        if isinstance(window, Steps):
            if window.discard:
                state, _ = run_steps(walk, state, data, window.discard)
            state, made = run_steps(walk, state, data, window.per_sample)
        else:
            state, made = run_epoch(walk, state, data)
        theta_s = walk.sample(state.theta, made.kept, made.steps)
        return state, theta_s, ChainInfo(made.loss, made.steps)

    return Sampler(init, sample, lambda state: state.theta, temperature)


def plain_walk(objective: Objective, step: Step, average: bool) -> Walk:
    """`step` with the gradient of all parameters, and the running mean of its iterates."""

    def start(theta: Params) -> Kept:
        # Before any step the average is θ itself: an empty client's sample is θ₀, its delta 0.
        return widened(theta) if average else ()

    def move(
        theta: Params,
        memory: Memory,
        mean: Kept,
        k: Count,
        batch: Minibatch,
        n: Count,
        keys: StepKeys,
    ) -> tuple[Params, Memory, Kept, Scalar]:
        def gradient(theta: Params) -> tuple[Scalar, Params]:
            return jax.value_and_grad(minibatch_loss, argnums=1)(objective, theta, batch, keys.loss)

        theta, memory, loss = step.apply(theta, memory, gradient, n, keys.step)
        if average:
            mean = jax.tree.map(
                lambda m, x: m + (x.astype(m.dtype) - m) / k.astype(m.dtype), mean, theta
            )
        return theta, memory, mean, loss

    def sample(theta: Params, mean: Kept, k: Count) -> Params:
        return narrowed(mean, theta) if average else theta

    return Walk(start, move, sample)


# Streams of randomness derived from a chain's key.
_LOSS, _BATCH, _ORDER, _STEP, _START = 1, 2, 3, 4, 5


def _stream(state: ChainState, number: int) -> Key:
    return jax.random.fold_in(jax.random.fold_in(state.key, number), state.steps)


def _start(walk: Walk, theta: Params) -> _Window:
    return _Window(walk.start(theta), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))


def check_window(window: Window) -> None:
    if not isinstance(window, Epochs | Steps):
        raise refuse("window", window, "must be Epochs(…) or Steps(…)")
    check_integer("burn_in", window.burn_in, 0)
    if isinstance(window, Steps):
        check_integer("steps_per_sample", window.per_sample, 1)
        check_integer("discard_steps", window.discard, 0)
