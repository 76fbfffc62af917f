"""FedPA's controls: the mean of the samples without the covariance, and with FedPA's step length.

For small Ŝ and d ≫ ℓ, Δ̂ ≈ (1 + (ℓ−1)ρ)(θ₀ − x̄): mostly a *longer step*. A gain of FedPA's is one
of its covariance only where it beats this control with the same ρ, which sends that longer step and
nothing else: FedPA as if all samples were equal, whatever the server does with it.
"""

import jax

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, fedopt, phase_after
from fedpa.algorithms.local_training import LocalTraining, SamplerFactory, local_work, sampler_for
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.mean import mean
from fedpa.deltas.shrinkage import fixed
from fedpa.objectives.objective import Objective
from fedpa.samplers.sampler import Sampler
from fedpa.server.update import Server, check_server


@describe
def mean_control(
    local: LocalTraining,
    server: Server,
    *,
    burn_in_rounds: int = 0,
    rho: float = 0.0,
    sampler: SamplerFactory | None = None,
) -> Method:
    """Build FedPA's control: Δ = (1 + (ℓ−1)ρ)(θ₀ − x̄), the covariance left out.

    Args:
        local: As for FedPA.
        server: As for FedPA.
        burn_in_rounds: As for FedPA: rounds run as FedAvg first.
        rho: FedPA's ρ, for a step as long as FedPA's; 0 leaves the step as it is.
        sampler: As for FedPA.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10, epochs=5)
        >>> server = fedpa.Server(fedpa.server.sgd(1.0))
        >>> control = fedpa.mean_control(local, server, burn_in_rounds=10, rho=0.1)
    """
    check_server(server)
    fixed(rho)  # refuses a bad ρ
    phase = phase_after(burn_in_rounds)
    samples = local_work(local).samples
    factor = 1 + (samples - 1) * rho

    def build(objective: Objective) -> Algorithm:
        def sampler_at(rate: jax.Array) -> Sampler:
            return sampler_for(objective, local, rate, sampler)

        clients = {
            BURN_IN: fedavg_client(objective, local, server),
            SAMPLING: client_update(sampler_at, mean(factor), samples, server.weighting),
        }
        return fedopt(server, clients, phase, client_rate=local.schedule)

    return build
