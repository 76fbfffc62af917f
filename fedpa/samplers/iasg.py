"""IASG, iterate-averaged stochastic gradient (Algorithm 4; Mandt et al. 2017).

    burn-in:   θ ← ClientOpt(θ, ∇̂f_i(θ))                           B times
    sample s:  θ ← ClientOpt(θ, ∇̂f_i(θ)), S ← S ∪ {θ}              K times
               θ_s ← average of S

The average is a running one: memory does not grow with K. Without averaging the chain is local SGD
as FedAvg runs it (Algorithm 2); with noise in its step it is SGLD or SGHMC (`minibatch_chain`).

IASG has no temperature: the spread of its samples follows from learning rate, batch size and window
(docs/explanation/scale.md has the formula).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedpa.errors import check_integer, check_type
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.minibatches import (
    Minibatch,
    Order,
    batch_in_order,
    batch_with_replacement,
    check_order,
    epoch_order,
    steps_per_epoch,
)
from fedpa.objectives.objective import Objective, minibatch_loss
from fedpa.precision import narrow, widen
from fedpa.samplers.sampler import Epochs, Sampler, Steps, Temperature, Window, check_window
from fedpa.types import Count, Key, Params, Scalar
from fedpa.watching import watch

Memory = Any
"""What a step carries along beside θ: ClientOpt's state, a momentum, or nothing."""
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
    """What is known of a window's steps: means, never lists."""

    loss: Scalar
    """Mean of the mini-batch losses met while making the sample."""
    steps: Count
    """Steps made for the sample."""


class Average(NamedTuple):
    """How iterates are made and averaged; `fedpa.samplers.sparse_step` has a faster way."""

    init: Callable[[Params], Any]
    """θ before a window's first step → the average of no iterates."""
    step: Callable[[ChainState, Any, Count, Minibatch, Count], tuple[ChainState, Any, Scalar]]
    """(chain, average, k, mini-batch, n_i) → (chain, average, f̂): a window's k-th step."""
    value: Callable[[Params, Any, Count], Params]
    """(θ_K, average, K) → θ_s."""


Carry = tuple[ChainState, Any, ChainInfo]
"""A chain inside a window: its state, the average so far, what is known of the steps."""


def iasg(
    objective: Objective,
    optimizer: optax.GradientTransformation | float | jax.Array,
    *,
    batch_size: int,
    window: Window = Epochs(),
    order: Order = "shuffle",
    average: bool = True,
) -> Sampler:
    """Build iterate-averaged SGD (Algorithm 4): θ_s = (1/K) Σ θ_k over a window of K iterates.

    Args:
        objective: The client's loss.
        optimizer: ClientOpt: any optax transformation, or a number > 0, the rate of plain SGD
            (which leaves rows of a table alone that a mini-batch does not read,
            `Objective.sparse`).
        batch_size: Examples per step, at least 1.
        window: What makes a sample, and the burn-in before the first; default: one epoch each.
        order: Reshuffled epochs ("shuffle", the default) or independent draws ("replacement").
        average: False returns the last iterate of each window instead of the average.
    Returns:
        The sampler; it has no temperature.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = iasg(objective, optax.sgd(0.1, momentum=0.9), batch_size=20, window=Steps(50))
        >>> sampler.temperature is None
        True
    """
    from fedpa.samplers.sparse_step import average_sparsely

    rate = None
    if not isinstance(optimizer, optax.GradientTransformation):
        rate, optimizer = optimizer, plain_sgd(optimizer)

    def client_opt(
        theta: Params, state: optax.OptState, gradient_at: Gradient, n: Count, key: Key
    ) -> tuple[Params, optax.OptState, Scalar]:
        loss, gradient = gradient_at(theta)
        updates, state = optimizer.update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state, loss

    step = Step(lambda theta0, n, key: optimizer.init(theta0), client_opt)

    def average_for(theta: Params) -> Average:
        sparse = None if rate is None else average_sparsely(objective, rate, average, theta)
        return sparse or average_densely(objective, step, average)

    return minibatch_chain(objective, step, batch_size, window, order, average_for=average_for)


def minibatch_chain(
    objective: Objective,
    step: Step,
    batch_size: int,
    window: Window,
    order: Order,
    *,
    temperature: Temperature | None = None,
    average_for: Callable[[Params], Average] | None = None,
) -> Sampler:
    """Algorithm 4 with any step: IASG, local SGD, SGLD and SGHMC visit the same mini-batches.

    average_for: θ → how its iterates are averaged; by default they are not.
    """
    check_type("objective", objective, Objective, "fedpa.Objective(loss)")
    check_integer("batch_size", batch_size, 1)
    check_window(window)
    check_order(order)
    average_for = average_for or (lambda theta: average_densely(objective, step, average=False))

    def make_step(how: Average, carry: Carry, data: ClientData, index: Any) -> Carry:
        """θ ← ClientOpt(θ, ∇̂f_i(θ)), S ← S ∪ {θ}."""
        state, mean, seen = carry
        if order == "replacement":
            batch = batch_with_replacement(data, fold_key(state, _BATCH), batch_size)
        else:
            batch = batch_in_order(data, state.order, index, batch_size)
        k = seen.steps + 1
        state, mean, loss = how.step(state, mean, k, batch, data.n)
        watch(state.steps, loss=loss, theta=state.theta)
        change = (loss.astype(jnp.float32) - seen.loss) / k.astype(jnp.float32)
        return state._replace(steps=state.steps + 1), mean, ChainInfo(seen.loss + change, k)

    def begin_epoch(state: ChainState, data: ClientData) -> ChainState:
        if order == "shuffle":
            key = jax.random.fold_in(jax.random.fold_in(state.key, _ORDER), state.epoch)
            state = state._replace(order=epoch_order(data, key))
        return state._replace(epoch=state.epoch + 1)

    def begin_window(how: Average, state: ChainState) -> Carry:
        info = ChainInfo(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
        return state, how.init(state.theta), info

    def run_epoch(how: Average, state: ChainState, data: ClientData) -> Carry:
        end: Carry = jax.lax.fori_loop(
            0,
            steps_per_epoch(data.n, batch_size),
            lambda index, carry: make_step(how, carry, data, index),
            begin_window(how, begin_epoch(state, data)),
        )
        return end

    def run_steps(how: Average, state: ChainState, data: ClientData, num: int) -> Carry:
        epoch_length = jnp.maximum(steps_per_epoch(data.n, batch_size), 1)

        def body(_: Any, carry: Carry) -> Carry:
            state, mean, seen = carry
            state = jax.lax.cond(
                state.position == 0, lambda s: begin_epoch(s, data), lambda s: s, state
            )
            state, mean, seen = make_step(how, (state, mean, seen), data, state.position)
            return state._replace(position=(state.position + 1) % epoch_length), mean, seen

        trips = jnp.where(data.n > 0, num, 0)
        end: Carry = jax.lax.fori_loop(0, trips, body, begin_window(how, state))
        return end

    def init(theta0: Params, data: ClientData, key: Key) -> ChainState:
        """B steps, or epochs, of burn-in."""
        order = jnp.zeros(jax.tree.leaves(data.examples)[0].shape[0], jnp.int32)
        memory = step.init(theta0, data.n, jax.random.fold_in(key, _START))
        zero = jnp.zeros((), jnp.int32)
        state = ChainState(theta0, memory, key, zero, zero, order, zero)
        how = average_for(theta0)
        if not window.burn_in:
            return state
        if isinstance(window, Steps):
            return run_steps(how, state, data, window.burn_in)[0]
        start: ChainState = jax.lax.fori_loop(
            0, window.burn_in, lambda _, state: run_epoch(how, state, data)[0], state
        )
        return start

    def sample(state: ChainState, data: ClientData) -> tuple[ChainState, Params, ChainInfo]:
        """K steps, or an epoch; θ_s is the average of their iterates."""
        how = average_for(state.theta)
        if isinstance(window, Steps):
            if window.discard:
                state = run_steps(how, state, data, window.discard)[0]
            state, mean, info = run_steps(how, state, data, window.per_sample)
        else:
            state, mean, info = run_epoch(how, state, data)
        return state, how.value(state.theta, mean, info.steps), info

    return Sampler(init, sample, lambda state: state.theta, temperature)


def average_densely(objective: Objective, step: Step, average: bool) -> Average:
    """S̄ ← S̄ + ((θ_{k−1} − S̄) + (θ_k − S̄))/k at every second step k of a window.

    Averaging costs its passes over memory, and θ_{k−1} is still there when θ_k is made: taking both
    at once halves them. The last iterate of an odd number is taken in when the average is read.
    """

    def init(theta: Params) -> Any:
        # Before any step the average is θ itself: an empty client's sample is θ₀, its delta 0.
        return widen(theta) if average else ()

    def apply(
        state: ChainState, mean: Any, k: Count, batch: Minibatch, n: Count
    ) -> tuple[ChainState, Any, Scalar]:
        key = fold_key(state, LOSS)

        def gradient(theta: Params) -> tuple[Scalar, Params]:
            return jax.value_and_grad(minibatch_loss, argnums=1)(objective, theta, batch, key)

        theta, memory, loss = step.apply(
            state.theta, state.memory, gradient, n, fold_key(state, _STEP)
        )
        if average:
            mean = jax.lax.cond(
                k % 2 == 0, lambda: include(mean, k, state.theta, theta), lambda: mean
            )
        return state._replace(theta=theta, memory=memory), mean, loss

    def value(theta: Params, mean: Any, k: Count) -> Params:
        if not average:
            return theta
        with_last = include(mean, jnp.maximum(k, 1), theta)
        mean = jax.tree.map(lambda m, x: jnp.where(k % 2 == 0, m, x), mean, with_last)
        return narrow(mean, theta)

    def include(mean: Any, k: Count, *iterates: Params) -> Any:
        """The mean of k iterates from that of all but these."""

        def move(m: Array, *each: Array) -> Array:
            return m + sum(x.astype(m.dtype) - m for x in each) / k.astype(m.dtype)

        return jax.tree.map(move, mean, *iterates)

    return Average(init, apply, value)


def plain_sgd(rate: Any) -> optax.GradientTransformation:
    """θ ← θ − η g; parameters keep their dtype."""
    return optax.stateless(lambda g, _: jax.tree.map(lambda g: jnp.asarray(-rate, g.dtype) * g, g))


# Streams of randomness derived from a chain's key.
LOSS, _BATCH, _ORDER, _STEP, _START = 1, 2, 3, 4, 5


def fold_key(state: ChainState, number: int) -> Key:
    """The key of a stream at the chain's next step."""
    return jax.random.fold_in(jax.random.fold_in(state.key, number), state.steps)
