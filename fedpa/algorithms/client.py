"""The client update of FedAvg and FedPA (Algorithms 2 and 3).

    Algorithm 2:  θ_K ← K steps of ClientOpt from θ₀;        Δ = θ₀ − θ_K
    Algorithm 3:  θ_s ~ ClientMCMC, s = 1 … ℓ;               Δ̂ = Σ̂⁻¹(θ₀ − μ̂), as samples come

Both are a sampler (`samplers/iasg.py`, Algorithm 4) and a delta (`deltas/`): Algorithm 2 is the
sampler without averaging and the delta of the last iterate.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.fedopt import Broadcast, ClientResult, ClientState, ClientUpdate
from fedpa.deltas.delta import Delta, DeltaInfo, check_value
from fedpa.errors import check_integer, check_type
from fedpa.objectives.client_data import ClientData
from fedpa.samplers.sampler import Sampler, check_sample
from fedpa.server.aggregation import Weighting, check_weighting, client_weight
from fedpa.types import Key, Params, Scalar


class ClientInfo(NamedTuple):
    """Diagnostics of a client's work, averaged over clients in records."""

    loss: Scalar
    """Mean training loss met during local work."""
    delta_norm: Scalar
    """‖Δ‖."""
    correction_norm: Scalar
    """‖Δ − (θ₀ − θ_K)‖: what was changed against FedAvg's delta from the same chain."""
    correction_cosine: Scalar
    """Cosine of the angle between Δ and θ₀ − θ_K."""
    rho: Scalar
    """The ρ in use; 0 where Σ̂ = I."""
    ess: Scalar
    """How many independent samples the client's samples are worth; 0 where it uses none."""


def client_update(
    sampler: Sampler | Callable[[jax.Array], Sampler],
    delta: Delta,
    samples: int = 1,
    weighting: Weighting = "examples",
) -> ClientUpdate:
    """Assemble a client update from a sampler and a delta (Algorithms 2 and 3).

    Args:
        sampler: How samples of the client's posterior are drawn; or a function of the round's
            learning-rate multiplier (`LocalTraining.schedule`) that gives it.
        delta: Computes what is sent from the samples.
        samples: ℓ ≥ 1.
        weighting: q_i: `examples`, n_i, or `uniform`, 1.
    Returns:
        (message, data, state, key) → `ClientResult`: what `fedopt` and engines take.
    Example:
        >>> import fedpa
        >>> def method(objective):  # FedAvg's client with the mean of two epochs, not their last
        ...     sampler = fedpa.samplers.iasg(objective, 0.1, batch_size=10)
        ...     client = fedpa.client_update(sampler, fedpa.deltas.mean(), samples=2)
        ...     return fedpa.fedopt(fedpa.Server(fedpa.server.sgd(1.0)), client)
    """
    check_type("delta", delta, Delta, "fedpa.deltas.mean()")
    check_integer("samples", samples, 1)
    check_weighting(weighting)
    if not callable(sampler):
        check_type(
            "sampler", sampler, Sampler, "fedpa.samplers.iasg(objective, 0.1, batch_size=10)"
        )

    def client(message: Broadcast, data: ClientData, state: ClientState, key: Key) -> ClientResult:
        drawn: Any = sampler(message.rate) if callable(sampler) else sampler
        check_type("sampler", drawn, Sampler, "a function of the rate that gives one")
        _, result, info = run_client(drawn, delta, samples, message.theta, data, key)
        return ClientResult(result, client_weight(weighting, data.n), state, info)

    return client


def run_client(
    sampler: Sampler, delta: Delta, samples: int, theta0: Params, data: ClientData, key: Key
) -> tuple[Any, Params, ClientInfo]:
    """Run a client's local work: the last iterate, Δ, and diagnostics."""

    def body(_: Any, carry: tuple[Any, Any, Scalar]) -> tuple[Any, Any, Scalar]:
        chain, sums, loss = carry
        chain, theta_s, info = check_sample(sampler.sample(chain, data), theta0)
        sums = delta.update(sums, theta_s, sampler.position(chain))
        return chain, sums, loss + info.loss.astype(jnp.float32)

    start = (sampler.init(theta0, data, key), delta.init(theta0, data.n), jnp.zeros(()))
    chain, sums, loss = jax.lax.fori_loop(0, samples, body, start)
    result, made = check_value(delta.value(sums), theta0)
    uncorrected = optax.tree.sub(theta0, sampler.position(chain))
    return chain, result, client_info(result, uncorrected, loss / samples, made)


def client_info(
    delta: Params, uncorrected: Params, loss: Scalar, made: DeltaInfo | None = None
) -> ClientInfo:
    """`made` is what the delta says of itself; None if it is made of no samples."""
    return ClientInfo(
        loss,
        optax.tree.norm(delta),
        optax.tree.norm(optax.tree.sub(delta, uncorrected)),
        cosine(delta, uncorrected),
        *(made or (jnp.zeros(()), jnp.zeros(()))),
    )


def cosine(one: Params, other: Params) -> Scalar:
    """Of the angle between them; 1 where one of them is 0."""
    both = optax.tree.norm(one) * optax.tree.norm(other)
    return jnp.where(both > 0, optax.tree.vdot(one, other) / jnp.where(both > 0, both, 1), 1)
