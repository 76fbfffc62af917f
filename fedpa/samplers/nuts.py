"""NUTS, the no-U-turn sampler (Hoffman and Gelman 2014), on blackjax.

HMC whose trajectory doubles until it turns back on itself: no trajectory length to choose. Full
gradients; see `fedpa.samplers.hamiltonian` for temperature and step size. Vectorized over clients,
all wait for the longest trajectory.
"""

from fedpa.errors import check_integer
from fedpa.objectives.objective import Objective
from fedpa.samplers.hamiltonian import hamiltonian
from fedpa.samplers.sampler import Epochs, Rate, Sampler, Temperature, Window, import_blackjax

MAX_DOUBLINGS = 3
"""Few: where the data leave directions flat, a trajectory finds no turn and goes on to the last."""


def nuts(
    objective: Objective,
    learning_rate: Rate,
    *,
    window: Window = Epochs(),
    temperature: Temperature | None = None,
    max_doublings: int = MAX_DOUBLINGS,
    target_acceptance: float | None = None,
) -> Sampler:
    """Build the sampler.

    learning_rate: η; ε = √(ηT/n_i).
    window: transitions per sample and before the first.
    temperature: T, or 'n' for n_i; it must be given.
    max_doublings: a trajectory has at most 2 to this power leapfrog steps.
    target_acceptance: adapt ε in the burn-in, say to 0.8; None keeps it.
    """
    check_integer("max_doublings", max_doublings, 1)
    kernel = import_blackjax("mcmc.nuts").build_kernel()
    return hamiltonian(
        objective, kernel, max_doublings, learning_rate, window, temperature, target_acceptance
    )
