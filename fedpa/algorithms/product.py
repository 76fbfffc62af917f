"""The product of the clients' own posteriors, eq. 3 from samples at temperature 1, in one round.

    p(θ | D) ∝ Π_i p₀^{n_i/n} exp ℓ_i  ≈  Π_i N(μ_i, Σ_i)

Each client's posterior holds its share of the prior, so that the product has it once; the prior
must be proper, or a client whose data are separable has no posterior of its own. μ_i and Σ_i are
those of draws of p₀^{n_i/n} exp ℓ_i. Exact where client posteriors are Gaussian; where they are
skewed, their product is far from the posterior, and EP is not.
"""

from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.methods import Method, describe
from fedpa.algorithms.sites import Cavity, check_structure, infer_by_sites, inner_site
from fedpa.errors import refuse
from fedpa.objectives.objective import Objective
from fedpa.objectives.prior import NormalPrior
from fedpa.precisions.gaussian import Structure
from fedpa.sites.site import FindSite


@describe
def product(*, inner: str | FindSite = "nuts", structure: Structure = "dense") -> Method:
    """Build the product of samples: client's prior p₀^{n_i/n}, one round of all clients.

    Args:
        inner: A client's inference: "nuts", "hmc", "laplace", "variational"; or one of
            `fedpa.sites` with settings of its own.
        structure: "dense" or "diagonal" precisions.
    Returns:
        The method, for `fedpa.fit` and `fedpa.infer`.
    Example:
        >>> import fedpa
        >>> method = fedpa.algorithms.product(inner="nuts")
    """
    check_structure(structure)
    find = inner_site(inner, structure)

    def build(objective: Objective) -> Algorithm:
        prior = objective.prior
        if not isinstance(prior, NormalPrior) or not prior.is_proper:
            raise refuse(
                "prior",
                prior,
                "must be proper for a product: every client's posterior holds a share of it; "
                "fedpa.normal_prior(sd=2.0)",
            )
        own = Cavity(lambda q, site, p0, share: p0.power(share), keeps_site=False)
        return infer_by_sites(objective, find, own, structure)

    return build
