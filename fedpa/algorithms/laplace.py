"""Laplace's approximation of the global posterior, by federated Newton steps.

    Λ = Λ₀ + Σ_i H_i(θ),   θ ← θ + Λ⁻¹(∇log p₀(θ) + Σ_i ∇ℓ_i(θ)),   H_i = −∇²ℓ_i

Clients send H_i and ∇ℓ_i + H_iθ, which add up. At the mode N(θ, Λ⁻¹) is the approximation; where
likelihoods are Gaussian one round is exact, from any θ. A step after which the log-posterior is
lower is taken back by half.
"""

from fedpa.algorithms.fedopt import Algorithm
from fedpa.algorithms.methods import Method, describe
from fedpa.algorithms.sites import check_structure, infer_by_sites
from fedpa.objectives.objective import Objective
from fedpa.precisions.gaussian import Structure


@describe
def laplace(*, structure: Structure = "dense") -> Method:
    """Build Laplace's approximation: client's prior none, client's precision H_i, server's Σ H_i.

    All clients must take part in every round.

    Args:
        structure: "dense", or "diagonal" for the diagonal of every H_i.
    Returns:
        The method, for `fedpa.fit` and `fedpa.infer`.
    Example:
        >>> import fedpa
        >>> method = fedpa.algorithms.laplace()
    """
    check_structure(structure)

    def build(objective: Objective) -> Algorithm:
        return infer_by_sites(objective, None, None, structure)

    return build
