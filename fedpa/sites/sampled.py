"""The site from draws of the tilted density cavity · exp ℓ_i, by HMC or NUTS: EP's moments.

Chains start at draws of the tilted density's Laplace approximation (of the guess, where Λ is
diagonal), whose covariance is their inverse mass matrix: there is little to adapt.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpa.errors import check_integer, refuse
from fedpa.precisions.gaussian import Gaussian, Structure
from fedpa.samplers.diagnostics import measure_mixing
from fedpa.samplers.hmc import hmc
from fedpa.samplers.nuts import nuts
from fedpa.samplers.sampler import Epochs, Sampler
from fedpa.sites.laplace import find_mode
from fedpa.sites.site import FindSite, Local, SiteInfo, fit_score, linearize
from fedpa.types import Key

CHAINS = 4
DRAWS = 250
BURN_IN = 50
ACCEPTANCE = 0.8
STEP = 0.7
"""ε at the start, in units of the mass matrix."""
LEAPFROGS = 4
"""L of HMC: with ε around 0.7, a bit less than half a period of a standard normal."""


def sampled(
    kind: str = "nuts",
    structure: Structure = "dense",
    *,
    chains: int = CHAINS,
    draws: int = DRAWS,
    burn_in: int = BURN_IN,
) -> FindSite:
    """Build the site from draws of cavity · exp ℓ_i: the least-squares line through ∇ℓ_i.

    Args:
        kind: "nuts" or "hmc".
        structure: Of Λ_i: "dense" or "diagonal".
        chains: At least 2: R̂ compares them.
        draws: Of each chain, at least 4; all chains together must have more than there are
            parameters.
        burn_in: Transitions before the first draw, at least 20, in which ε is adapted.
    Returns:
        (client's likelihood, cavity, guess, key) → (site, info).
    Example:
        >>> find = fedpa.sites.sampled("nuts", draws=500)
    """
    check_integer("chains", chains, 2)
    check_integer("draws", draws, 4)
    check_integer("burn_in", burn_in, 20)
    if kind not in ("nuts", "hmc"):
        raise refuse("kind", kind, "must be 'nuts' or 'hmc'")
    build: Callable[..., Sampler] = nuts if kind == "nuts" else hmc
    options: dict[str, Any] = {} if kind == "nuts" else {"integration_steps": LEAPFROGS}

    def find(
        local: Local, cavity: Gaussian, guess: Gaussian, key: Key
    ) -> tuple[Gaussian, SiteInfo]:
        d = len(guess.eta)
        if structure == "dense" and chains * draws <= d:
            raise refuse(
                "draws",
                draws,
                f"{chains} chains have {chains * draws:,} draws, and {d:,} parameters need more: "
                f"fedpa.sites.sampled({kind!r}, draws={2 * d // chains}), or structure='diagonal'",
            )
        if structure == "dense":
            guess = _improve(local, cavity, guess)
            mass = guess.root @ guess.root.T
        else:
            mass = guess.sd**2
        sampler = build(
            local.with_prior(cavity),
            step_size=STEP,
            mass=mass,
            window=Epochs(burn_in),
            target_acceptance=ACCEPTANCE,
            **options,
        )
        start_key, *keys = jax.random.split(key, 1 + chains)
        starts = guess.draw(jax.random.normal(start_key, (chains, d), guess.eta.dtype))

        def run(start: jax.Array, key: Key) -> tuple[jax.Array, Any]:
            def step(state: Any, _: None) -> tuple[Any, Any]:
                state, theta, info = sampler.sample(state, local.data)
                return state, (theta, info)

            state = sampler.init(start, local.data, key)
            drawn: tuple[jax.Array, Any] = jax.lax.scan(step, state, None, length=draws)[1]
            return drawn

        points, infos = jax.vmap(run)(starts, jnp.stack(keys))
        site = fit_score(local, points.reshape(-1, d), structure)
        mixing = measure_mixing(points)
        info = SiteInfo(
            jnp.asarray(mixing.rhat),
            jnp.asarray(mixing.ess),
            jnp.mean(infos.acceptance),
            jnp.sum(infos.divergent, dtype=jnp.int32),
        )
        return site, info

    return find


def _improve(local: Local, cavity: Gaussian, guess: Gaussian) -> Gaussian:
    """Laplace's approximation of the tilted density; the guess, where that is none."""
    mode = find_mode(local, cavity, guess.mean, "dense")
    better = linearize(local, mode, "dense").times(cavity)
    # Centred at the mode, around which chains start; its own mean is one more Newton step away.
    better = better._replace(eta=better.precision.times(mode))
    proper = better.is_proper
    chosen: Gaussian = jax.tree.map(lambda a, b: jnp.where(proper, a, b), better, guess)
    return chosen
