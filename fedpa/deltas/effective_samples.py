"""How many independent samples a client's ℓ samples are worth, seen from their steps alone.

    r₁ = 1 − ½ Σ_s ‖x_{s+1} − x_s‖² / Σ_s ‖x_s − x̄‖²,   ESS = ℓ (1 − r₁) / (1 + r₁),  1 ≤ ESS ≤ ℓ

r₁ is the autocorrelation at lag one over all parameters jointly, by von Neumann's ratio; the rest
is what an AR(1) chain makes of it. Independent samples have r₁ ≈ 0. Samples that still travel from
θ₀ to the client's optimum have r₁ near 1 and count as one: their spread is the path's, not the
posterior's. With the few samples of a round a single client's number is rough; a cohort's mean is
not. (`fedpa.samplers.diagnose` looks at long chains, parameter by parameter.)
"""

from typing import Any

import jax.numpy as jnp


def effective_samples(count: Any, steps: Any, spread: Any, xp: Any = jnp) -> Any:
    """ESS from ℓ, Σ ‖x_{s+1} − x_s‖² and Σ ‖x_s − x̄‖²; 1 for copies of one point."""
    moved = spread > 0
    ratio = xp.where(moved, steps / (2 * xp.where(moved, spread, 1)), 0)
    worth = count * ratio / xp.where(ratio < 2, 2 - ratio, 1)
    return xp.clip(xp.where(ratio < 2, worth, count), xp.minimum(count, 1), count)


def squared_steps(gram: Any, xp: Any = jnp) -> Any:
    """‖x_{s+1} − x_s‖², s = 1 … ℓ−1, from the samples' inner products (about any origin)."""
    squares = xp.diagonal(gram)
    return squares[1:] + squares[:-1] - 2 * xp.diagonal(gram, 1)
