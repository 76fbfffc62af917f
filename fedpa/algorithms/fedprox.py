"""FedProx (Li et al. 2020): local SGD on f_i(θ) + μ/2 ‖θ − θ₀‖², which keeps clients near θ₀.

θ ← ClientOpt(θ, ∇̂f_i(θ) + μ(θ − θ₀))

The rest is FedAvg; μ = 0 is FedAvg. (The paper's γ-inexactness is in the local work: clients may do
as little as they like. Here all do that of `local`.) The pull is dense: a table's rows move whether
a batch reads them or not.
"""

import jax
import jax.numpy as jnp
import optax

from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.local_training import LocalTraining, as_optimizer, local_work
from fedpa.algorithms.methods import Method, describe
from fedpa.errors import check_number
from fedpa.server.update import Server
from fedpa.types import Params


@describe
def fedprox(local: LocalTraining, server: Server, *, proximal: float) -> Method:
    """Build FedProx: FedAvg on f_i(θ) + μ/2 ‖θ − θ₀‖².

    Args:
        local: The clients' work.
        server: The server's side.
        proximal: μ ≥ 0; 0 is FedAvg.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> method = fedpa.fedprox(local, fedpa.Server(fedpa.server.sgd(1.0)), proximal=0.01)
    """
    local_work(local)
    check_number("proximal", proximal)
    pulled = optax.chain(pull(proximal), as_optimizer(local.optimizer))
    return fedavg(local._replace(optimizer=pulled), server)


def pull(mu: float) -> optax.GradientTransformation:
    """g ← g + μ(θ − θ₀); what it remembers is θ₀."""

    def update(
        gradient: Params, theta0: Params, theta: Params | None = None
    ) -> tuple[Params, Params]:
        pulled = jax.tree.map(
            lambda g, x, x0: g + jnp.asarray(mu, g.dtype) * (x - x0), gradient, theta, theta0
        )
        return pulled, theta0

    return optax.GradientTransformation(lambda theta0: theta0, update)
