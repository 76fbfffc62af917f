"""HMC, Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), on blackjax.

v ~ N(0, I), L leapfrog steps of size ε on H(θ, v) = −log p_i(θ) + ½‖v‖², taken with probability
min(1, exp(−ΔH)). Full gradients; see `fedpa.samplers.hamiltonian` for temperature and step size.
"""

from fedpa.errors import check_integer
from fedpa.objectives.objective import Objective
from fedpa.samplers.hamiltonian import hamiltonian
from fedpa.samplers.sampler import Epochs, Rate, Sampler, Temperature, Window, import_blackjax

INTEGRATION_STEPS = 2
"""Few: L steps travel from θ₀ L²/2 times as far as one step of SGD, too far for FedPA's rates."""


def hmc(
    objective: Objective,
    learning_rate: Rate,
    *,
    window: Window = Epochs(),
    temperature: Temperature | None = None,
    integration_steps: int = INTEGRATION_STEPS,
    target_acceptance: float | None = None,
) -> Sampler:
    """Build the sampler.

    learning_rate: η; ε = √(ηT/n_i).
    window: transitions per sample and before the first.
    temperature: T, or 'n' for n_i; it must be given.
    integration_steps: L.
    target_acceptance: adapt ε in the burn-in, say to 0.65; None keeps it.
    """
    check_integer("integration_steps", integration_steps, 1)
    kernel = import_blackjax("mcmc.hmc").build_kernel()
    return hamiltonian(
        objective, kernel, integration_steps, learning_rate, window, temperature, target_acceptance
    )
