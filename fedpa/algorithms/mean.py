"""FedPA's controls: the mean of the samples without the covariance, and with FedPA's step length.

For small Ŝ and d ≫ ℓ, Δ̂ ≈ (1 + (ℓ−1)ρ)(θ₀ − x̄): mostly a *longer step*. A gain of FedPA's is one
of its covariance only where it beats `mean_scaled`, which takes that longer step and nothing else.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, fedopt, phase_after
from fedpa.algorithms.local_training import LocalTraining, SamplerFactory, local_work, sampler_for
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.mean import mean as mean_delta
from fedpa.deltas.shrinkage import fixed
from fedpa.objectives.objective import Objective
from fedpa.samplers.sampler import Sampler
from fedpa.server.update import Server, check_server


@describe
def mean(
    local: LocalTraining,
    server: Server,
    *,
    burn_in_rounds: int = 0,
    rho: Any = 0.0,
    sampler: SamplerFactory | None = None,
) -> Method:
    """FedPA's rounds with Δ = θ₀ − x̄; in sampling rounds the server rate is × (1 + (ℓ−1)ρ)."""
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
            SAMPLING: client_update(sampler_at, mean_delta(), samples, server.weighting),
        }
        return fedopt(
            server,
            clients,
            phase,
            client_rate=local.schedule,
            server_rate=lambda t: jnp.where(jnp.asarray(t) >= burn_in_rounds, factor, 1.0),
        )

    return build
