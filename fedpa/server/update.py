"""ServerUpdate, Algorithm 1 line 9: θ ← ServerOpt(θ, Δ), with Δ taken as a gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from fedpa.server.aggregation import all_finite
from fedpa.server.averaging import Averaging, none
from fedpa.server.weighting import Weighting
from fedpa.types import Params, Scalar


class Server(NamedTuple):
    """The server's side of an algorithm."""

    optimizer: optax.GradientTransformation
    """`fedpa.server.sgd`, `adam`, `adagrad`, `yogi`, or any optax transformation."""
    weighting: Weighting = "examples"
    averaging: Averaging = none()


class ServerState(NamedTuple):
    theta: Params
    optimizer: optax.OptState
    average: Any


class ServerInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """The aggregate was not finite, or of no client, and the state stayed as it was."""


def init(server: Server, theta: Params) -> ServerState:
    return ServerState(theta, server.optimizer.init(theta), server.averaging.init(theta))


def update(
    server: Server, state: ServerState, delta: Params, weight: Scalar, rate: float | Array = 1.0
) -> tuple[ServerState, ServerInfo]:
    """One server step; `rate` multiplies the server's learning rate.

    A Δ that is not finite, that leads to a θ that is not, or that no client took part in
    (Σ q_i = `weight` = 0) leaves the state as it was.
    """
    updates, opt_state = server.optimizer.update(delta, state.optimizer, state.theta)
    theta = jax.tree.map(
        lambda x, u: x + (jnp.asarray(rate, u.dtype) * u).astype(x.dtype), state.theta, updates
    )
    new = ServerState(theta, opt_state, server.averaging.update(state.average, theta))
    ok = all_finite((delta, theta)) & (weight > 0)
    kept = jax.tree.map(lambda fresh, old: jnp.where(ok, fresh, old), new, state)
    return kept, ServerInfo(~ok)


def parameters(server: Server, state: ServerState) -> Params:
    """The θ to evaluate and to return: the average of iterates if one is kept."""
    return server.averaging.value(state.average)
