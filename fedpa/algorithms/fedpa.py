"""FedPA, federated posterior averaging (Algorithms 1, 3 and 4).

burn-in rounds:  Δ_i = θ − θ_K                       (FedAvg)
then:            Δ_i = Σ̂_i⁻¹ (θ − μ̂_i)  from ℓ posterior samples (IASG)
server:          θ ← ServerOpt(θ, Σ q_i Δ_i / Σ q_i)
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, fedopt, phase_after
from fedpa.algorithms.local_training import LocalTraining, SamplerFactory, local_work, sampler_for
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.posterior import SampleScale, posterior
from fedpa.deltas.shrinkage import shrinkage
from fedpa.objectives.objective import Objective
from fedpa.samplers.sampler import Sampler
from fedpa.server.update import Server, check_server


@describe
def fedpa(
    local: LocalTraining,
    server: Server,
    *,
    rho: Any,
    burn_in_rounds: int = 0,
    target: str = "identity",
    sample_scale: SampleScale = "auto",
    form: str = "auto",
    sampler: SamplerFactory | None = None,
) -> Method:
    """Build FedPA.

    rho: the shrinkage ρ ≥ 0, or 'oas' or 'rblw' to choose it from each client's samples.
    burn_in_rounds: rounds run as FedAvg first.
    target, form: see `fedpa.deltas.shrinkage` and `fedpa.deltas.posterior`.
    sample_scale: multiplies the samples' deviations from their mean: `auto`, √(n_i/T) for a sampler
        with a temperature and nothing for IASG (the paper); `none`; `sqrt-n`; or a number.
    sampler: (objective, learning-rate multiplier of the round) → the sampler to use in place of
        IASG on `local`; it is asked for as many samples as `local` says.
    """
    check_server(server)
    shrink = shrinkage(rho, target)
    phase = phase_after(burn_in_rounds)
    samples = local_work(local).samples
    delta_of = functools.partial(posterior, samples, shrink, sample_scale=sample_scale, form=form)
    delta_of()  # refuses bad settings
    if samples == 1:
        warnings.warn(
            "samples = 1: one sample has no covariance, so that FedPA sends θ₀ − x̄ whatever ρ is. "
            "Raise epochs or samples",
            stacklevel=2,
        )

    def build(objective: Objective) -> Algorithm:
        def sampler_at(rate: jax.Array) -> Sampler:
            return sampler_for(objective, local, rate, sampler)

        delta = delta_of(temperature=sampler_at(jnp.ones(())).temperature)
        clients = {
            BURN_IN: fedavg_client(objective, local, server),
            SAMPLING: client_update(sampler_at, delta, samples, server.weighting),
        }
        return fedopt(server, clients, phase, local.schedule)

    return build
