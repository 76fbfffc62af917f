"""MIME and MimeLite (Karimireddy et al. 2021, Algorithm 1): clients mimic a centralised optimizer.

Of a base algorithm B = (U, V), U moves the parameters and V tracks statistics s (a momentum, Adam's
moments). Clients apply U at every step with the server's s, which stays as it is meanwhile:

    c ← Σ_S q_i ∇f_i(x) / Σ_S q_i                               (MIME: before the clients begin)
    client:  g ← ∇̂f_i(y) − ∇̂f_i(x) + c, both on one mini-batch  (MIME)
             g ← ∇̂f_i(y)                                        (MimeLite)
             y ← ClientOpt(y, U(g, s)),  K_i times from y = x
    server:  s ← V(Σ_S q_i ∇f_i(x) / Σ_S q_i, s)
             x ← Σ_S q_i y_i / Σ_S q_i                          (ServerOpt = SGD with rate 1)

∇f_i(x) is over all of a client's examples. MIME's c is that of the round's own cohort, as printed,
so a round has two round trips: clients are asked for their gradients first (`Algorithm.inquiry`).
(The c of the round before would save one; it lags, and with much local work diverges.) MimeLite has
one trip; its clients send ∇f_i(x) with x − y. s begins at 0, without bias correction.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.client import client_info, run_client
from fedpa.algorithms.fedopt import (
    Algorithm,
    Broadcast,
    ClientResult,
    Inquiry,
    Sent,
    Shared,
    fedopt,
)
from fedpa.algorithms.local_training import LocalTraining, as_optimizer, local_work, scale_rate
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.last_iterate import last_iterate
from fedpa.errors import check_type
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.minibatches import Minibatch, steps_per_epoch, sum_batches
from fedpa.objectives.objective import Objective, or_one, penalty, sum_losses
from fedpa.precision import narrow, widen
from fedpa.samplers.iasg import Gradient, Step, minibatch_chain
from fedpa.samplers.sampler import Sampler
from fedpa.server import optimizers
from fedpa.server.aggregation import Aggregate, client_weight
from fedpa.server.update import Server, ServerState, check_server
from fedpa.types import Count, Key, Params, Scalar

Statistics = Any


class Base(NamedTuple):
    """A base optimizer that clients mimic: B = (U, V).

    Args:
        init: θ → s before the first round.
        move: U: (g, s) → the direction of a step.
        track: V: (g, s) → s.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> base = fedpa.algorithms.momentum(0.9)
        >>> [round(float(x), 1) for x in base.move(jnp.ones(2), jnp.zeros(2))]
        [0.1, 0.1]
    """

    init: Callable[[Params], Statistics]
    move: Callable[[Params, Statistics], Params]
    track: Callable[[Params, Statistics], Statistics]


def momentum(beta: float) -> Base:
    """Make SGD with momentum a base: U(g, m) = V(g, m) = (1 − β)g + βm. SGD for β = 0.

    Args:
        beta: β in [0, 1).
    Returns:
        The base, for `mime` and `mime_lite`.
    Example:
        >>> import fedpa
        >>> base = fedpa.algorithms.momentum(0.9)
    """
    optimizers.check_decays(momentum=beta)

    def mix(g: Params, m: Params) -> Params:
        return jax.tree.map(lambda g, m: (1 - beta) * g + beta * m, g, m)

    return Base(optax.tree.zeros_like, mix, mix)


class Moments(NamedTuple):
    m: Params
    v: Params


def moments(second_moment: optimizers.SecondMoment, b1: float, tau: float) -> Base:
    """Make an adaptive optimizer a base: U(g, s) = m/(√v + τ) with m ← (1 − β₁)g + β₁m.

    Args:
        second_moment: (v, g²) → v, as in `fedpa.server.optimizers`: `decaying(0.99)` is Adam's.
        b1: β₁ in [0, 1).
        tau: τ ≥ 0.
    Returns:
        The base, for `mime` and `mime_lite`.
    Example:
        >>> import fedpa
        >>> from fedpa.server import optimizers
        >>> base = fedpa.algorithms.moments(optimizers.decaying(0.99), b1=0.9, tau=1e-3)
    """
    optimizers.check_decays(b1=b1)

    def mix(g: Params, s: Moments) -> Params:
        return jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m, g, s.m)

    def move(g: Params, s: Moments) -> Params:
        return jax.tree.map(lambda m, v: optimizers.over_root(m, v, tau), mix(g, s), s.v)

    def track(g: Params, s: Moments) -> Moments:
        return Moments(mix(g, s), jax.tree.map(lambda v, g: second_moment(v, g**2), s.v, g))

    def init(theta: Params) -> Moments:
        return Moments(optax.tree.zeros_like(theta), optax.tree.zeros_like(theta))

    return Base(init, move, track)


class MimeShared(NamedTuple):
    statistics: Statistics
    """s."""
    gradient: Params
    """c, from this round's inquiry on; () in MimeLite."""


class InquiryInfo(NamedTuple):
    loss: Scalar


@describe
def mime(local: LocalTraining, server: Server, *, base: Base) -> Method:
    """Build MIME: clients apply a centralised optimizer's step, corrected by ∇f(x).

    Args:
        local: The clients' work; its optimizer should be plain SGD.
        server: The server's side, SGD with rate 1 in the paper.
        base: What clients mimic: `fedpa.algorithms.momentum(0.9)` or `moments(…)`.
    Returns:
        The method, for `fedpa.fit`. A round has two round trips.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> side = fedpa.Server(fedpa.server.sgd(1.0))
        >>> method = fedpa.mime(local, side, base=fedpa.algorithms.momentum(0.9))
    """
    return _method(local, server, base, control_variates=True)


@describe
def mime_lite(local: LocalTraining, server: Server, *, base: Base) -> Method:
    """Build MimeLite: MIME without control variates, half the gradients, one round trip.

    Args:
        local: The clients' work; its optimizer should be plain SGD.
        server: The server's side, SGD with rate 1 in the paper.
        base: What clients mimic: `fedpa.algorithms.momentum(0.9)` or `moments(…)`.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> side = fedpa.Server(fedpa.server.sgd(1.0))
        >>> method = fedpa.mime_lite(local, side, base=fedpa.algorithms.momentum(0.9))
    """
    return _method(local, server, base, control_variates=False)


def _method(local: LocalTraining, server: Server, base: Any, control_variates: bool) -> Method:
    samples = local_work(local).samples
    check_server(server)
    check_type("base", base, Base, "fedpa.algorithms.momentum(0.9)")

    def init(theta: Params) -> MimeShared:
        return MimeShared(
            base.init(theta), optax.tree.zeros_like(theta) if control_variates else ()
        )

    def update(state: ServerState, aggregate: Aggregate) -> MimeShared:
        shared: MimeShared = state.shared
        gradient = shared.gradient if control_variates else aggregate.mean.more
        tracked = base.track(narrow(gradient, state.theta), shared.statistics)
        return shared._replace(statistics=tracked)

    def receive(state: ServerState, answer: Aggregate) -> ServerState:
        old = state.shared.gradient
        there = answer.weight > 0  # if no client answered, c stays as it was
        new = jax.tree.map(lambda a, b: jnp.where(there, a, b), narrow(answer.mean, old), old)
        return state._replace(shared=state.shared._replace(gradient=new))

    def build(objective: Objective) -> Algorithm:
        def full_gradient(theta: Params, data: ClientData, key: Key) -> tuple[Scalar, Params]:
            own = jax.random.fold_in(key, _FULL_GRADIENT)
            loss, gradient = client_gradient(objective, theta, data, own, local.batch_size)
            # An empty client has no gradient, not that of the regularizer or the prior.
            return loss, jax.tree.map(lambda g: jnp.where(data.n > 0, g, 0), gradient)

        def answer(theta: Params, data: ClientData, state: Any, key: Key) -> ClientResult:
            loss, gradient = full_gradient(theta, data, key)
            weight = client_weight(server.weighting, data.n)
            return ClientResult(gradient, weight, state, InquiryInfo(loss))

        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            sampler = _local_steps(objective, local, base, message, control_variates)
            _, delta, info = run_client(sampler, last_iterate(), samples, message.theta, data, key)
            gradient = () if control_variates else full_gradient(message.theta, data, key)[1]
            weight = client_weight(server.weighting, data.n)
            info = client_info(delta, delta, info.loss)
            return ClientResult(Sent(delta, gradient), weight, state, info)

        shared = Shared(init, update)
        frame = fedopt(server, client, client_rate=local.schedule, shared=shared)
        if not control_variates:
            return frame
        return frame._replace(inquiry=Inquiry(lambda state: state.theta, answer, receive))

    return build


_FULL_GRADIENT = 101
"""The stream of randomness of ∇f_i(x); a chain's own have small numbers."""


def _local_steps(
    objective: Objective,
    local: LocalTraining,
    base: Base,
    message: Broadcast,
    control_variates: bool,
) -> Sampler:
    """FedAvg's mini-batches; the gradient corrected and moved along by U. Always dense."""
    optimizer = as_optimizer(scale_rate(local.optimizer, message.rate))

    def step(
        y: Params, memory: optax.OptState, gradient_at: Gradient, n: Count, key: Key
    ) -> tuple[Params, optax.OptState, Scalar]:
        loss, g = gradient_at(y)
        if control_variates:
            _, at_x = gradient_at(message.theta)
            g = jax.tree.map(lambda g, gx, c: g - gx + c, g, at_x, message.shared.gradient)
        direction = base.move(g, message.shared.statistics)
        updates, memory = optimizer.update(direction, memory, y)
        return optax.apply_updates(y, updates), memory, loss

    walk = Step(lambda x, n, key: optimizer.init(x), step)
    window = local_work(local).window
    return minibatch_chain(objective, walk, local.batch_size, window, local.order)


def client_gradient(
    objective: Objective, theta: Params, data: ClientData, key: Key, batch_size: int
) -> tuple[Scalar, Params]:
    """f_i(θ) and ∇f_i(θ), summed up mini-batch by mini-batch: memory is that of one.

    As a step of local SGD has it: with reduction `sum` both are the mean over an epoch's batches.
    """

    def sums(index: Count, batch: Minibatch) -> tuple[Scalar, Scalar, Params]:
        (loss, weight), gradient = jax.value_and_grad(sum_losses, argnums=1, has_aux=True)(
            objective, theta, batch.examples, batch.weights, jax.random.fold_in(key, index)
        )
        return loss, weight, widen(gradient)

    loss, weight, gradient = sum_batches(sums, data, batch_size)
    steps = steps_per_epoch(data.n, batch_size)
    count = or_one(weight if objective.reduction == "mean" else steps.astype(weight.dtype))
    share = jnp.ones_like(weight) if objective.reduction == "mean" else weight / count
    added, pull = jax.value_and_grad(lambda theta: penalty(objective, theta, loss, share))(theta)
    mean = jax.tree.map(lambda g, p: g / count.astype(g.dtype) + widen(p), gradient, pull)
    return loss / count + added, narrow(mean, theta)
