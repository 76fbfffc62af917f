"""FedPA, federated posterior averaging (Algorithms 1, 3 and 4).

burn-in rounds:  Δ_i = θ − θ_K                       (FedAvg)
then:            Δ_i = Σ̂_i⁻¹ (θ − μ̂_i)  from ℓ posterior samples (IASG)
server:          θ ← ServerOpt(θ, Σ q_i Δ_i / Σ q_i)
"""

import functools
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedavg import fedavg_client
from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, fedopt, phase_after
from fedpa.algorithms.local_training import LocalTraining, SamplerFactory, local_work, sampler_for
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.delta import Delta
from fedpa.deltas.posterior import Form, SampleScale, posterior
from fedpa.deltas.shrinkage import Rho, Target, shrinkage
from fedpa.errors import check_type, refuse
from fedpa.objectives.objective import Objective
from fedpa.samplers.sampler import Sampler
from fedpa.server.update import Server, check_server


@describe
def fedpa(
    local: LocalTraining,
    server: Server,
    *,
    rho: Rho | None = None,
    burn_in_rounds: int = 0,
    target: Target = "identity",
    sample_scale: SampleScale = "auto",
    form: Form = "auto",
    delta: Delta | None = None,
    sampler: SamplerFactory | None = None,
) -> Method:
    """Build FedPA: clients send Δ̂ = Σ̂⁻¹(θ₀ − μ̂) from ℓ posterior samples (eq. 4, Theorem 3).

    Args:
        local: The clients' work. M epochs give ℓ = M samples, unless it says otherwise.
        server: The server's optimizer, aggregation and schedule.
        rho: The shrinkage ρ ≥ 0, or "oas" or "rblw" to choose it from each client's samples. Must
            be given, unless `delta` is.
        burn_in_rounds: Rounds run as FedAvg first.
        target: What Σ̂ is shrunk towards: "identity" (the paper) or "scaled".
        sample_scale: Multiplies the samples' deviations from their mean: "auto", √(n_i/T) for a
            sampler with a temperature and nothing for IASG (the paper); "none"; "sqrt-n"; or a
            number.
        form: How Δ̂ is computed: "gram", "recurrence", or "auto" for the faster one.
        delta: What clients make of their samples, in place of the posterior delta.
        sampler: (objective, learning-rate multiplier of the round) → the sampler to use in place of
            IASG on `local`; it is asked for as many samples as `local` says.
    Returns:
        The method, for `fedpa.fit`.
    Raises:
        FedpaError: A setting is out of range, or both `rho` and `delta` are given, or neither.
    Example:
        >>> import fedpa, optax
        >>> local = fedpa.LocalTraining(optax.sgd(0.1), batch_size=10, epochs=5)
        >>> server = fedpa.Server(fedpa.server.sgd(1.0))
        >>> method = fedpa.fedpa(local, server, rho=0.1, burn_in_rounds=10)
        >>> method.settings()["rho"]
        0.1
    """
    check_server(server)
    phase = phase_after(burn_in_rounds)
    samples = local_work(local).samples
    delta_of: Callable[..., Delta]
    if delta is not None:
        check_type("delta", delta, Delta, "fedpa.deltas.mean()")
        if rho is not None or (target, sample_scale, form) != ("identity", "auto", "auto"):
            raise refuse("delta", delta, "has its own settings: leave rho and the others out")
        delta_of = lambda temperature=None: delta  # noqa: E731
    elif rho is None:
        raise refuse("rho", None, "must be given: a number ≥ 0, 'oas' or 'rblw'; or delta=…")
    else:
        delta_of = functools.partial(
            posterior, samples, shrinkage(rho, target), sample_scale=sample_scale, form=form
        )
        delta_of()  # refuses bad settings
    if samples == 1 and delta is None:
        warnings.warn(
            "samples = 1: one sample has no covariance, so that FedPA sends θ₀ − x̄ whatever ρ is. "
            "Raise epochs or samples",
            stacklevel=2,
        )

    def build(objective: Objective) -> Algorithm:
        def sampler_at(rate: jax.Array) -> Sampler:
            return sampler_for(objective, local, rate, sampler)

        made = delta_of(temperature=sampler_at(jnp.ones(())).temperature)
        clients = {
            BURN_IN: fedavg_client(objective, local, server),
            SAMPLING: client_update(sampler_at, made, samples, server.weighting),
        }
        return fedopt(server, clients, phase, local.schedule)

    return build
