"""The variational site: the Gaussian nearest to cavity · exp ℓ_i in KL(q ‖ ·), as in PVI.

The optimum q_i = cavity · t_i has Λ_i = −E_{q_i}[∇²ℓ_i] and η_i = E_{q_i}[∇ℓ_i] + Λ_i μ_i (Opper
and Archambeau 2009): the line that fits ∇ℓ_i best over q_i itself. Iterated from the guess, with
the same standard normal draws, in pairs ±z, in every iteration.
"""

import jax
import jax.numpy as jnp

from fedpa.errors import check_integer
from fedpa.precisions.gaussian import Gaussian, Structure
from fedpa.sites.site import FindSite, Local, SiteInfo, fit_score, no_chains
from fedpa.types import Count, Key

STEPS = 5
PAIRS = 4
"""Pairs ±z for each parameter, at least `LEAST_PAIRS`."""
LEAST_PAIRS = 128


def variational(structure: Structure = "dense", *, steps: int = STEPS) -> FindSite:
    """Build the variational site, by fixed-point iterations of the optimum's equations.

    Args:
        structure: Of Λ_i: "dense" or "diagonal".
        steps: Iterations, ≥ 1; 1 is a natural-gradient step. EP's rounds iterate, too.
    Returns:
        (client's likelihood, cavity, guess, key) → (site, info).
    Example:
        >>> find = fedpa.sites.variational(steps=1)
    """
    check_integer("steps", steps, 1)

    def find(
        local: Local, cavity: Gaussian, guess: Gaussian, key: Key
    ) -> tuple[Gaussian, SiteInfo]:
        d = len(guess.eta)
        half = jax.random.normal(key, (max(LEAST_PAIRS, PAIRS * d), d), guess.eta.dtype)
        noise = jnp.concatenate([half, -half])

        def improve(_: Count, q: Gaussian) -> Gaussian:
            better = fit_score(local, q.draw(noise), structure).times(cavity)
            proper = better.is_proper  # where it is none, the guess stays
            kept: Gaussian = jax.tree.map(lambda new, old: jnp.where(proper, new, old), better, q)
            return kept

        q = jax.lax.fori_loop(0, steps - 1, improve, guess)
        return fit_score(local, q.draw(noise), structure), no_chains()

    return find
