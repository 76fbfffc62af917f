"""The client update that FedAvg, FedPA and their controls share (Algorithms 2 and 3).

θ_s ~ ClientMCMC, s = 1 … ℓ;   Δ from the samples as they come;   weight q_i
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.algorithm import ClientResult, ClientState, ClientUpdate, PartedUpdate
from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.objectives.client_data import ClientData
from fedpa.samplers.sampler import Sampler
from fedpa.server.weighting import client_weight
from fedpa.types import Count, Key, Params, Scalar


class Broadcast(NamedTuple):
    """What FedAvg, FedPA and their controls send to clients."""

    theta: Params
    rate: Scalar
    """Multiplies the client's learning rate this round."""


class ClientInfo(NamedTuple):
    loss: Scalar
    """Mean training loss met during local work."""
    delta_norm: Scalar
    """‖Δ‖."""
    correction_norm: Scalar
    """‖Δ − (θ₀ − θ_K)‖: what was changed against FedAvg's delta from the same chain."""
    correction_cosine: Scalar
    """Cosine of the angle between Δ and θ₀ − θ_K."""
    rho: Scalar
    ess: Scalar
    """How many independent samples the client's samples are worth; 0 where it uses none."""


class Sampled(NamedTuple):
    """Where a client stands when its chain has ended."""

    theta0: Params
    theta_k: Params
    loss: Scalar
    n: Count
    state: ClientState


def client_update(
    sampler_at: Callable[[jax.Array], Sampler], delta: Delta, samples: int, weighting: str
) -> ClientUpdate:
    """Assemble sampler and delta. `sampler_at` is given the round's learning-rate multiplier."""

    def sample(
        message: Broadcast, data: ClientData, state: ClientState, key: Key
    ) -> tuple[Sampled, Any]:
        sampler = sampler_at(message.rate)
        theta0 = message.theta

        def body(_: Any, carry: tuple[Any, Any, Scalar]) -> tuple[Any, Any, Scalar]:
            chain, sums, loss = carry
            chain, theta_s, info = sampler.sample(chain, data)
            sums = delta.update(sums, theta_s, sampler.position(chain))
            return chain, sums, loss + info.loss.astype(jnp.float32)

        start = (sampler.init(theta0, data, key), delta.init(theta0, data.n), jnp.zeros(()))
        chain, sums, loss = jax.lax.fori_loop(0, samples, body, start)
        return Sampled(theta0, sampler.position(chain), loss / samples, data.n, state), sums

    def finish(sampled: Sampled, value: tuple[Any, DeltaInfo]) -> ClientResult:
        result, delta_info = value
        uncorrected = optax.tree.sub(sampled.theta0, sampled.theta_k)
        info = client_info(result, uncorrected, sampled.loss, delta_info)
        return ClientResult(result, client_weight(weighting, sampled.n), sampled.state, info)

    def client(message: Broadcast, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        sampled, sums = sample(message, data, state, key)
        return finish(sampled, delta.value(sums))

    if delta.on_host is None:
        return client
    return PartedUpdate(client, sample, delta.on_host, finish)


def client_info(
    delta: Params, uncorrected: Params, loss: Scalar, made: DeltaInfo | None = None
) -> ClientInfo:
    """`made` is what the delta says of itself; None if it is made of no samples."""
    norm, plain = optax.tree.norm(delta), optax.tree.norm(uncorrected)
    both = norm * plain
    cosine = jnp.where(
        both > 0, optax.tree.vdot(delta, uncorrected) / jnp.where(both > 0, both, 1), 1
    )
    correction = optax.tree.norm(optax.tree.sub(delta, uncorrected))
    return ClientInfo(loss, norm, correction, cosine, *(made or (jnp.zeros(()), jnp.zeros(()))))
