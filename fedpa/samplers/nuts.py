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
"""Few: where the data leave directions flat, a trajectory finds no turn and takes all doublings."""


def nuts(
    objective: Objective,
    learning_rate: Rate,
    *,
    window: Window = Epochs(),
    temperature: Temperature | None = None,
    max_doublings: int = MAX_DOUBLINGS,
    target_acceptance: float | None = None,
) -> Sampler:
    """Build the no-U-turn sampler: HMC with ε = √(ηT/n_i) that chooses how far to go.

    Args:
        objective: The client's loss; every gradient is over all of the client's examples.
        learning_rate: η > 0, of a step on the mean loss.
        window: `Epochs(B)` is one transition per sample after B of burn-in; `Steps(K, B, discard)`
            is K + discard transitions per sample. Default: `Epochs(0)`.
        temperature: T > 0, or "n" for n_i; must be given.
        max_doublings: A trajectory has at most 2 to this power leapfrog steps, ≥ 1; default: 3.
        target_acceptance: Acceptance in (0, 1) to which ε is adapted in a burn-in of at least 20
            transitions, for example 0.8; default: ε is kept.
    Returns:
        The sampler; its info has loss, acceptance, divergent transitions and gradients.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> sampler = nuts(objective, 0.1, window=Epochs(50), temperature=1.0)
        >>> sampler.temperature
        1.0
    """
    check_integer("max_doublings", max_doublings, 1)
    kernel = import_blackjax("mcmc.nuts").build_kernel()
    return hamiltonian(
        objective, kernel, max_doublings, learning_rate, window, temperature, target_acceptance
    )
