"""ServerUpdate, Algorithm 1 line 9: θ ← ServerOpt(θ, Δ), with Δ taken as a gradient."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from fedpa.errors import check_type
from fedpa.precision import narrow
from fedpa.server.aggregation import (
    Aggregation,
    Weighting,
    all_finite,
    check_aggregation,
    check_weighting,
    weighted_mean,
)
from fedpa.server.averaging import Averaging, none
from fedpa.server.schedules import Schedule, constant
from fedpa.types import Params, Scalar


class Server(NamedTuple):
    """The server's side of a method: how results are weighed and averaged, and the step taken.

    Args:
        optimizer: `fedpa.server.sgd`, `adam`, `adagrad`, `yogi`, or any optax transformation.
        weighting: Client weights q_i: `examples`, n_i, or `uniform`, 1 (default: "examples").
        averaging: What is evaluated and returned: the last iterate, or a mean of iterates (default:
            none()).
        schedule: Round → the factor of the learning rate (default: constant(), which is 1). An
            optax schedule in the optimizer counts its own steps instead, and does not see rounds
            that were skipped.
        aggregation: How the results of a round's clients become one (default: weighted_mean()).
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.adam(0.01), weighting="uniform")
    """

    optimizer: optax.GradientTransformation
    weighting: Weighting = "examples"
    averaging: Averaging = none()
    schedule: Schedule = constant()
    aggregation: Aggregation = weighted_mean()


class ServerState(NamedTuple):
    """What the server keeps from round to round.

    Args:
        theta: θ, as clients are sent it.
        optimizer: What the optimizer keeps.
        average: What the averaging keeps.
        shared: What a method keeps beside θ and sends to clients with it: SCAFFOLD's c (default:
            ()).
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> from fedpa.server import update
        >>> state = update.init(fedpa.Server(fedpa.server.sgd(1.0)), jnp.zeros(3))
        >>> state.theta.shape
        (3,)
    """

    theta: Params
    optimizer: optax.OptState
    average: PyTree
    shared: PyTree = ()


class ServerInfo(NamedTuple):
    """What a person wants to see of a server step, as `train/<name>` in records.

    Args:
        skipped: The aggregate was not finite, or of no client, and the state stayed as it was.
        step_length: By what the step was multiplied, where the clients' deltas decide it (default:
            None).
    Example:
        >>> import jax.numpy as jnp
        >>> from fedpa.server import ServerInfo
        >>> bool(ServerInfo(skipped=jnp.asarray(False)).skipped)
        False
    """

    skipped: Bool[Array, ""]
    step_length: Scalar | None = None


def check_server(server: Any) -> None:
    """Refuse what is no `Server`, and settings it does not have."""
    check_type("server", server, Server, "fedpa.Server(fedpa.server.sgd(1.0))")
    check_type(
        "Server.optimizer", server.optimizer, optax.GradientTransformation, "fedpa.server.sgd(1.0)"
    )
    check_type("averaging", server.averaging, Averaging, "fedpa.server.averaging.polyak()")
    check_aggregation(server.aggregation)
    check_weighting(server.weighting)


def init(server: Server, theta: Params) -> ServerState:
    return ServerState(theta, server.optimizer.init(theta), server.averaging.init(theta))


def update(
    server: Server, state: ServerState, delta: Params, weight: Scalar, rate: float | Array = 1.0
) -> tuple[ServerState, ServerInfo]:
    """One server step; `rate` multiplies the server's learning rate.

    A Δ that is not finite, that leads to a θ that is not, or that no client took part in
    (Σ q_i = `weight` = 0) leaves the state unchanged.
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
