"""The oracle: clients send the exact delta Σ_i⁻¹(θ − μ_i) of eq. 4, from known quadratics.

The server's gradient is then exactly ∇Q(θ) (Prop. 2) over the cohort: what FedPA approximates.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedpa.algorithms.client import client_info
from fedpa.algorithms.fedopt import SAMPLING, Algorithm, Broadcast, ClientResult, fedopt
from fedpa.algorithms.methods import Method, describe
from fedpa.objectives import quadratic
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.objectives.quadratic import Quadratic
from fedpa.server.aggregation import client_weight
from fedpa.server.update import Server, check_server
from fedpa.types import Key


@describe
def exact_posterior(posterior: Callable[[ClientData], Quadratic], server: Server) -> Method:
    """`posterior` gives a client's quadratic, for example `least_squares.posterior`."""
    check_server(server)

    def build(objective: Objective) -> Algorithm:
        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            theta, unravel = ravel_pytree(message.theta)
            q = posterior(data)
            delta = unravel(quadratic.delta(q, theta))
            loss = quadratic.value(q, theta).astype(jnp.float32)
            info = client_info(delta, delta, loss)
            return ClientResult(delta, client_weight(server.weighting, data.n), state, info)

        return fedopt(server, {SAMPLING: client}, lambda _: SAMPLING)

    return build
