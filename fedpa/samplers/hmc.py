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
    """Build Hamiltonian Monte Carlo: L leapfrog steps of size ε = √(ηT/n_i), then accept or reject.

    Args:
        objective: The client's loss; every gradient is over all of the client's examples.
        learning_rate: η > 0, of a step on the mean loss.
        window: `Epochs(B)` is one transition per sample after B of burn-in; `Steps(K, B, discard)`
            is K + discard transitions per sample. Default: `Epochs(0)`.
        temperature: T > 0, or "n" for n_i; must be given.
        integration_steps: L ≥ 1; default: 2.
        target_acceptance: Acceptance in (0, 1) to which ε is adapted in a burn-in of at least 20
            transitions, for example 0.65; default: ε is kept.
    Returns:
        The sampler; its info has loss, acceptance, divergent transitions and gradients.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = hmc(objective, 0.1, window=Epochs(50), temperature=1.0, integration_steps=8)
        >>> sampler.temperature
        1.0
    """
    check_integer("integration_steps", integration_steps, 1)
    kernel = import_blackjax("mcmc.hmc").build_kernel()
    return hamiltonian(
        objective, kernel, integration_steps, learning_rate, window, temperature, target_acceptance
    )
