"""FedExP (Jhunjhunwala et al. 2023, Algorithm 1): FedAvg, the server's step extrapolated.

    η_g = max(1, Σ q_i ‖Δ_i‖² / (2 Σ q_i (‖Δ̄‖² + ε))),   Δ̄ = Σ q_i Δ_i / Σ q_i
    θ ← θ − η_g Δ̄

(Equal weights give the paper's M = Σ q_i.) The more clients disagree, the longer the step. Each
sends one number more, ‖Δ_i‖². η_g multiplies the rate of the server given, 1 in the paper. There
the mean of the last two iterates is evaluated, as they jump about: `averaging.last_two()`, the
command line's default. Clients are sent the last iterate.
"""

from typing import Any

import jax.numpy as jnp
import optax

from fedpa.algorithms.fedavg import fedavg, fedavg_client
from fedpa.algorithms.fedopt import Algorithm, Broadcast, ClientResult, Sent, fedopt
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.methods import Method, describe
from fedpa.errors import check_number
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.precision import widen
from fedpa.server import update as server_update
from fedpa.server.aggregation import Aggregate
from fedpa.server.update import Server, ServerInfo, ServerState
from fedpa.types import Key, Params, Scalar


@describe
def fedexp(local: LocalTraining, server: Server, *, epsilon: float = 1e-3) -> Method:
    """Build FedExP: FedAvg with the server's step extrapolated, times η_g ≥ 1.

    Args:
        local: The clients' work.
        server: The server's side; η_g multiplies its rate, 1 in the paper.
        epsilon: ε ≥ 0, which bounds η_g.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), averaging=fedpa.server.averaging.last_two())
        >>> method = fedpa.fedexp(fedpa.LocalTraining(0.1, batch_size=10, epochs=5), side)
    """
    fedavg(local, server)  # refuses what FedAvg refuses
    check_number("epsilon", epsilon)

    def build(objective: Objective) -> Algorithm:
        averaging = fedavg_client(objective, local, server)

        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            out = averaging(message, data, state, key)
            square = optax.tree.norm(widen(out.result), squared=True)
            return out._replace(result=Sent(out.result, square))

        def step(
            state: ServerState, aggregate: Aggregate, t: Any
        ) -> tuple[ServerState, ServerInfo]:
            length = step_length(aggregate.mean.more, aggregate.mean.delta, epsilon)
            new, info = server_update.update(
                server, state, aggregate.mean.delta, aggregate.weight, length * server.schedule(t)
            )
            return new, info._replace(step_length=length)

        frame = fedopt(server, client, client_rate=local.schedule)
        return frame._replace(server=step)

    return build


def step_length(square: Scalar, delta: Params, epsilon: float) -> Scalar:
    """η_g from the mean of ‖Δ_i‖² and the mean delta; 1 where nothing moved."""
    twice = 2 * (optax.tree.norm(delta, squared=True) + epsilon)
    return jnp.maximum(1, square / jnp.where(twice > 0, twice, 1))
