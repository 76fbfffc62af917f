"""ServerUpdate, Algorithm 1 line 9: θ ← ServerOpt(θ, Δ), with Δ taken as a gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from fedpa.errors import check_type
from fedpa.precision import narrow
from fedpa.server.aggregation import all_finite, check_weighting
from fedpa.server.averaging import Averaging, none
from fedpa.server.schedules import constant
from fedpa.types import Params, Scalar


class Server(NamedTuple):
    """The server's side of an algorithm."""

    optimizer: optax.GradientTransformation
    """`fedpa.server.sgd`, `adam`, `adagrad`, `yogi`, or any optax transformation."""
    weighting: str = "examples"
    """Client weights q_i: `examples` or `uniform`."""
    averaging: Averaging = none()
    schedule: Callable[[Any], Any] = constant(1.0)
    """Multiplies the learning rate, by round. (An optax schedule in the optimizer counts its own
    steps instead, and does not see rounds that were skipped.)"""


class ServerState(NamedTuple):
    theta: Params
    optimizer: optax.OptState
    average: Any
    shared: Any = ()
    """What a method keeps beside θ and sends to clients with it: SCAFFOLD's c."""


class ServerInfo(NamedTuple):
    skipped: Bool[Array, ""]
    """The aggregate was not finite, or of no client, and the state stayed as it was."""
    step_length: Scalar | None = None
    """By what the step was multiplied, where the clients' deltas decide it."""


def check_server(server: Any) -> None:
    """Refuse what is no `Server`, and settings it does not have."""
    check_type("server", server, Server, "fedpa.Server(fedpa.server.sgd(1.0))")
    check_type("optimizer", server.optimizer, optax.GradientTransformation, "fedpa.server.sgd(1.0)")
    check_type("averaging", server.averaging, Averaging, "fedpa.server.averaging.polyak()")
    check_weighting(server.weighting)


def init(server: Server, theta: Params) -> ServerState:
    return ServerState(theta, server.optimizer.init(theta), server.averaging.init(theta))


def update(
    server: Server, state: ServerState, delta: Params, weight: Scalar, rate: float | Array = 1.0
) -> tuple[ServerState, ServerInfo]:
    """One server step; `rate` multiplies the server's learning rate.

    A Δ that is not finite, that leads to a θ that is not, or that no client took part in
    (Σ q_i = `weight` = 0) leaves the state as it was.
    """
    delta = narrow(delta, state.theta)
    updates, opt_state = server.optimizer.update(delta, state.optimizer, state.theta)
    theta = jax.tree.map(
        lambda x, u: x + (jnp.asarray(rate, u.dtype) * u).astype(x.dtype), state.theta, updates
    )
    average = server.averaging.update(state.average, theta)
    new = ServerState(theta, opt_state, average, state.shared)
    # A huge Δ may be finite and its square in the optimizer's state not: that would never heal.
    ok = all_finite((delta, theta, opt_state)) & (weight > 0)
    kept = jax.tree.map(lambda fresh, old: jnp.where(ok, fresh, old), new, state)
    return kept, ServerInfo(~ok)


def parameters(server: Server, state: ServerState) -> Params:
    """The θ to evaluate and to return: the average of iterates if one is kept."""
    return server.averaging.value(state.average)
