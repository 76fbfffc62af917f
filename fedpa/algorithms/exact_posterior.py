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
    """Build the oracle: clients send the exact delta Σ_i⁻¹(θ − μ_i) of eq. 4.

    Args:
        posterior: A client's data → its quadratic.
        server: The server's side.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(0.1))
        >>> method = fedpa.exact_posterior(fedpa.objectives.least_squares.posterior, side)
    """
    check_server(server)

    def build(objective: Objective) -> Algorithm:
        def client(message: Broadcast, data: ClientData, state: Any, key: Key) -> ClientResult:
            theta, unravel = ravel_pytree(message.theta)
            q = posterior(data)
            delta = unravel(quadratic.delta(q, theta))
            loss = quadratic.value(q, theta).astype(jnp.float32)
            info = client_info(delta, delta, loss)
            return ClientResult(delta, client_weight(server.weighting, data.n), state, info)

        return fedopt(server, {SAMPLING: client})

    return build
