"""Algorithm 1, generalized federated optimization: broadcast θ, average deltas, step.

The frame of FedAvg, FedPA and the controls. Those that sample do so after burn-in rounds in which
clients run the very program FedAvg runs; rounds count from 0.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from fedpa.algorithms.algorithm import BURN_IN, SAMPLING, Algorithm, ClientUpdate
from fedpa.algorithms.client_update import Broadcast
from fedpa.errors import check_integer
from fedpa.server import update as server_update
from fedpa.server.aggregation import Aggregate, weighted_mean
from fedpa.server.schedules import constant
from fedpa.server.update import Server, ServerInfo, ServerState, check_server


def generalized(
    server: Server,
    clients: Mapping[str, ClientUpdate],
    phase: Callable[[int], str],
    client_rate: Callable[[Any], Any] = constant(1.0),
    server_rate: Callable[[Any], Any] = constant(1.0),
) -> Algorithm:
    """Algorithm 1 around the given client updates; the rates multiply learning rates by round."""
    check_server(server)

    def broadcast(state: ServerState, t: Any) -> Broadcast:
        return Broadcast(state.theta, jnp.asarray(client_rate(t), jnp.float32))

    def step(state: ServerState, aggregate: Aggregate, t: Any) -> tuple[ServerState, ServerInfo]:
        return server_update.update(
            server, state, aggregate.mean, aggregate.weight, server_rate(t) * server.schedule(t)
        )

    return Algorithm(
        init=lambda theta: server_update.init(server, theta),
        phase=phase,
        broadcast=broadcast,
        clients=clients,
        client_init=lambda theta: (),
        aggregation=weighted_mean(),
        server=step,
        parameters=lambda state: server_update.parameters(server, state),
    )


def phase_after(burn_in_rounds: int) -> Callable[[int], str]:
    """round → phase: sampling from round `burn_in_rounds` on."""
    check_integer("burn_in_rounds", burn_in_rounds, 0)
    return lambda t: SAMPLING if t >= burn_in_rounds else BURN_IN
