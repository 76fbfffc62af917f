"""EP and PVI: each client's prior is what the prior and all *other* clients say.

    cavity  c_i = q / t_i,      t_i ← t_i (t_i^new / t_i)^ε,      q = p₀ Π t_i

EP (Minka 2001; Gelman et al. 2020 for data in parts): t_i^new gives c_i t_i the moments of the
tilted density c_i exp ℓ_i. PVI (Ashman et al. 2022): c_i t_i is the Gaussian nearest to it in
KL(q ‖ ·). Both are the line that fits ∇ℓ_i best, over the tilted density or over q (`fedpa.sites`):
one algorithm, and a choice of a client's inference. Clients keep their sites.
"""

from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.methods import Method, describe
from fedpa.algorithms.sites import (
    DAMPING,
    NEWTON_ROUNDS,
    Cavity,
    check_damping,
    check_structure,
    infer_by_sites,
    inner_site,
)
from fedpa.errors import check_integer
from fedpa.objectives.objective import Objective
from fedpa.precisions.gaussian import Structure
from fedpa.sites.site import FindSite


@describe
def ep(
    *,
    inner: str | FindSite = "nuts",
    structure: Structure = "dense",
    damping: float = DAMPING,
    newton_rounds: int = NEWTON_ROUNDS,
) -> Method:
    """Build expectation propagation: client's prior q/t_i, its site from the tilted density.

    Args:
        inner: A client's inference: "nuts", "hmc", "laplace", "variational"; or one of
            `fedpa.sites` with settings of its own.
        structure: "dense" or "diagonal" precisions.
        damping: ε in (0, 1]: which part of a site's change is made; halved whenever it would leave
            no density.
        newton_rounds: Rounds of all clients that come first, in which sites are those of Laplace's
            approximation; 0 starts from the prior, which must be proper then.
    Returns:
        The method, for `fedpa.fit` and `fedpa.infer`.
    Example:
        >>> import fedpa
        >>> method = fedpa.algorithms.ep(inner="nuts", damping=0.5)
    """
    check_structure(structure)
    check_damping(damping)
    check_integer("newton_rounds", newton_rounds, 0)
    find = inner_site(inner, structure)

    def build(objective: Objective) -> Algorithm:
        own = Cavity(lambda q, site, p0, share: q.divide(site), keeps_site=True)
        return infer_by_sites(
            objective, find, own, structure, damping=damping, newton_rounds=newton_rounds
        )

    return build


@describe
def pvi(
    *,
    structure: Structure = "dense",
    damping: float = DAMPING,
    newton_rounds: int = NEWTON_ROUNDS,
) -> Method:
    """Build partitioned variational inference: EP whose clients find variational Gaussians.

    Its result is the Gaussian that variational inference on the pooled data finds.

    Args:
        structure: As for `ep`.
        damping: As for `ep`.
        newton_rounds: As for `ep`.
    Returns:
        The method, for `fedpa.fit` and `fedpa.infer`.
    Example:
        >>> import fedpa
        >>> method = fedpa.algorithms.pvi()
    """
    return ep(
        inner="variational", structure=structure, damping=damping, newton_rounds=newton_rounds
    )
