"""SEP, stochastic EP (Li et al. 2015): EP without client state, for clients that may not return.

With w_i = n_i/n a client's site is taken as the share (q / p₀)^{w_i} of what all of them say:

    cavity  c_i = q^{1 − w_i} p₀^{w_i},      q ← q Π_{i ∈ S} (t_i^new / (q/p₀)^{w_i})^{ε n/Σ_S n_i}

(Without p₀^{w_i} the prior would be lost in the rounds.) Where a round has some of the clients
only, they speak for all, and ε must fall for q to settle.
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
from fedpa.errors import check_integer, check_number
from fedpa.objectives.objective import Objective
from fedpa.precisions.gaussian import Structure
from fedpa.sites.site import FindSite


@describe
def sep(
    *,
    inner: str | FindSite = "nuts",
    structure: Structure = "dense",
    damping: float = DAMPING,
    decay: float = 0.0,
    newton_rounds: int = NEWTON_ROUNDS,
) -> Method:
    """Build stochastic EP: client's prior q^{1−w_i} p₀^{w_i}, nothing kept at clients.

    Args:
        inner: A client's inference: "nuts", "hmc", "laplace", "variational"; or one of
            `fedpa.sites` with settings of its own.
        structure: "dense" or "diagonal" precisions.
        damping: ε in (0, 1].
        decay: c ≥ 0; the k-th round's damping is ε/(1 + c k). 0 where all clients take part,
            about 0.5 where a round has some of them.
        newton_rounds: As for `ep`; 0 where a round has some of the clients.
    Returns:
        The method, for `fedpa.fit` and `fedpa.infer`.
    Example:
        >>> import fedpa
        >>> method = fedpa.algorithms.sep(decay=0.5, newton_rounds=0)
    """
    check_structure(structure)
    check_damping(damping)
    check_number("decay", decay)
    check_integer("newton_rounds", newton_rounds, 0)
    find = inner_site(inner, structure)

    def build(objective: Objective) -> Algorithm:
        own = Cavity(
            lambda q, site, p0, share: q.power(1 - share).times(p0.power(share)), keeps_site=False
        )
        return infer_by_sites(
            objective, find, own, structure, damping, decay=decay, newton_rounds=newton_rounds
        )

    return build
