"""NUTS, the no-U-turn sampler (Hoffman and Gelman 2014), on blackjax.

HMC whose trajectory doubles until it turns back on itself: no trajectory length to choose. Full
gradients; see `fedpa.samplers.hamiltonian` for temperature and step size. Vectorized over clients,
all wait for the longest trajectory.
"""

from fedpa.errors import check_integer
from fedpa.objectives.objective import Objective
from fedpa.samplers.hamiltonian import Mass, hamiltonian
from fedpa.samplers.sampler import Epochs, Rate, Sampler, Temperature, Window, import_blackjax


def nuts(
    objective: Objective,
    learning_rate: Rate | None = None,
    *,
    step_size: Rate | None = None,
    mass: Mass = None,
    window: Window = Epochs(),
    temperature: Temperature = 1.0,
    max_doublings: int = 10,
    target_acceptance: float | None = None,
) -> Sampler:
    """Build the no-U-turn sampler: HMC with step size ε that chooses how far to go.

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
        max_doublings: A trajectory has at most 2 to this power leapfrog steps, ≥ 1; default: 10.
        target_acceptance: Acceptance in (0, 1) to which ε is adapted in a burn-in of at least 20
            transitions; default: ε is kept, and adapted to 0.8 if it is not given or the mass is
            adapted.
    Returns:
        The sampler; its info has loss, acceptance, divergent transitions and gradients.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = nuts(objective, mass="dense", window=Epochs(500))
        >>> data = {"x": np.eye(4, 2), "y": np.ones(4)}
        >>> fedpa.samplers.draw(sampler, jnp.zeros(2), data, jax.random.key(0), 100)[0].shape
        (100, 2)
    """
    check_integer("max_doublings", max_doublings, 1)
    kernel = import_blackjax("mcmc.nuts").build_kernel()
    return hamiltonian(
        objective,
        kernel,
        max_doublings,
        learning_rate=learning_rate,
        step_size=step_size,
        mass=mass,
        window=window,
        temperature=temperature,
        target_acceptance=target_acceptance,
    )
