"""HMC, Hamiltonian Monte Carlo (Duane et al. 1987; Neal 2011), on blackjax.

v ~ N(0, I), L leapfrog steps of size ε on H(θ, v) = −log p_i(θ) + ½‖v‖², taken with probability
min(1, exp(−ΔH)). Full gradients; see `fedpa.samplers.hamiltonian` for temperature and step size.
"""

from fedpa.errors import check_integer
from fedpa.objectives.objective import Objective
from fedpa.samplers.hamiltonian import Mass, hamiltonian
from fedpa.samplers.sampler import Epochs, Rate, Sampler, Temperature, Window, import_blackjax


def hmc(
    objective: Objective,
    learning_rate: Rate | None = None,
    *,
    step_size: Rate | None = None,
    mass: Mass = None,
    window: Window = Epochs(),
    temperature: Temperature = 1.0,
    integration_steps: int = 10,
    target_acceptance: float | None = None,
) -> Sampler:
    """Build Hamiltonian Monte Carlo: L leapfrog steps of size ε, then accept or reject.

    Args:
        objective: The client's loss; every gradient is over all of the client's examples.
        learning_rate: η > 0, of a step on the mean loss: ε = √(ηT/n_i). Give it or `step_size`; or
            neither, and ε is found and adapted in the burn-in.
        step_size: ε > 0, in units of the mass: near 1 where the mass is the posterior's.
        mass: The inverse mass matrix, over θ's parameters as one vector: None for the identity (the
            default); "diagonal" or "dense", adapted with ε in a burn-in of at least 120
            transitions; or an array of the expected posterior variances, (d,), or covariance,
            (d, d). An array may be traced.
        window: `Epochs(B)` is one transition per sample after B of burn-in; `Steps(K, B, discard)`
            is K + discard transitions per sample. Default: `Epochs(0)`.
        temperature: T > 0, or "n" for n_i; default: 1, the Bayesian posterior.
        integration_steps: L ≥ 1; default: 10.
        target_acceptance: Acceptance in (0, 1) to which ε is adapted in a burn-in of at least 20
            transitions; default: ε is kept, and adapted to 0.8 if it is not given or the mass is
            adapted.
    Returns:
        The sampler; its info has loss, acceptance, divergent transitions and gradients.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = hmc(objective, 0.1, window=Epochs(50), integration_steps=8)
        >>> sampler.temperature
        1.0
    """
    check_integer("integration_steps", integration_steps, 1)
    kernel = import_blackjax("mcmc.hmc").build_kernel()
    return hamiltonian(
        objective,
        kernel,
        integration_steps,
        learning_rate=learning_rate,
        step_size=step_size,
        mass=mass,
        window=window,
        temperature=temperature,
        target_acceptance=target_acceptance,
    )
