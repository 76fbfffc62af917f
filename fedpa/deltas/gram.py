"""The posterior delta in Gram form: Theorem 3 by one ℓ×d by d×ℓ product and an ℓ×ℓ system.

With X the ℓ×d matrix of samples minus their mean and b = x₀ − x̄, Σ̂ = a (I + r Ŝ) = a (I + κ XᵀX),
κ = r/(ℓ−1), and by the Woodbury identity

    Δ̂ = Σ̂⁻¹ b = (1/a) [b − κ Xᵀ (I_ℓ + κ XXᵀ)⁻¹ X b].

With the paper's shrinkage κ = ρ and 1/a = 1 + (ℓ−1)ρ. Numerics:

- Rows are differences to the last sample, E = x_j − x_ℓ and e = x₀ − x_ℓ, rather than to a rounded
  mean; centring happens in the ℓ×ℓ space.
- Rounding in XXᵀ alone would cost up to κ‖X‖² to the power 3/2 in relative error where x₀ − x̄ lies
  along the samples' spread (always for d < ℓ). Where λ_max(Σ̃) is large enough for that to matter,
  X itself is decomposed, X = U diag(σ) Vᵀ, and Δ̂ = (1/a) [b − V diag(κσ²/(1 + κσ²)) Vᵀb]: slower,
  and as accurate as a backward-stable dense solve, ε·λ_max(Σ̃).

Two ways to run it: `on_device`, inside compiled programs, and `on_host`, NumPy with everything of
size ℓ×ℓ and all sums in float64, blocks of columns at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.deltas.shrinkage import Moments, Shrinkage, coefficients
from fedpa.types import Scalar

DECOMPOSE_ABOVE = 30.0
"""λ_max(Σ̃) beyond which X is decomposed rather than XXᵀ."""

BLOCK = 1 << 17
"""Numbers the host form converts to float64 at a time: about what a core's cache holds."""


class Solution(NamedTuple):
    """What follows from the Gram matrix, all in the ℓ×ℓ space; NumPy or JAX."""

    weights: Any
    """w with Δ̃ = a Δ̂ = e − wᵀE."""
    kappa: Any
    largest: Any
    """λ_max(Σ̃) of Σ̃ = I + κ XᵀX."""
    a: Any
    """Σ̂ = a Σ̃."""
    rho: Any


def solution(
    gram: Any,
    along: Any,
    center: Callable[[Any], Any],
    mean: Any,
    ell: Any,
    dim: int,
    scale: Any,
    shrink: Shrinkage,
) -> Solution:
    """Choose ρ and solve, from E Eᵀ and E e.

    center: y ↦ H y, y minus its mean over the samples, so that X = H E. mean: the weights of the
    sample mean, 1/ℓ each. scale: multiplies the deviations X in the covariance.
    """
    xp = np if isinstance(gram, np.ndarray) else jnp
    eigenvalues, vectors = xp.linalg.eigh(center(center(gram).T))
    eigenvalues = xp.maximum(eigenvalues, 0.0) * scale**2
    degrees = xp.maximum(ell - 1, 1.0)
    moments = Moments(eigenvalues.sum() / degrees, (eigenvalues**2).sum() / degrees**2, ell, dim)
    a, r, rho = coefficients(shrink, moments)
    kappa = r / degrees
    spectrum = 1 + kappa * eigenvalues
    kappa = kappa * scale**2
    # b = e − Eᵀ1/ℓ, so X b is known here: H (E e − E Eᵀ1/ℓ).
    onto = vectors.T @ center(along - gram @ mean)
    weights = mean + kappa * center(vectors @ (onto / spectrum))
    return Solution(weights, kappa, xp.max(spectrum), a, rho)


def decomposed(deviations: Any, b: Any, kappa: Any) -> Any:
    """Σ̃⁻¹ b from X = U diag(σ) Vᵀ."""
    xp = np if isinstance(b, np.ndarray) else jnp
    _, sigma, rows = xp.linalg.svd(deviations, full_matrices=False)
    steep = kappa * sigma**2
    shares = xp.where(steep < float("inf"), steep / (1 + steep), 1.0)
    return b - (shares * (rows @ b)) @ rows


def on_device(
    theta0: Float[Array, " d"],
    samples: Float[Array, "l d"],
    count: Scalar,
    scale: Scalar,
    shrink: Shrinkage,
) -> tuple[Float[Array, " d"], Scalar]:
    """Δ̂ of the first `count` rows of `samples`, and ρ. Traceable; the rest are masked exactly."""
    real = (jnp.arange(samples.shape[0], dtype=samples.dtype) < count).astype(samples.dtype)
    last = samples[jnp.maximum(count.astype(jnp.int32) - 1, 0)]
    rows = (samples - last[None, :]) * real[:, None]
    start = theta0 - last

    def product(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)

    def center(y: Array) -> Array:
        mask = real if y.ndim == 1 else real[:, None]
        return (y - (jnp.sum(y * mask, 0, keepdims=True) / count)) * mask

    mean = real / count
    s = solution(
        product(rows, rows.T),
        product(rows, start),
        center,
        mean,
        count,
        theta0.shape[0],
        scale,
        shrink,
    )
    delta = jax.lax.cond(
        s.largest > DECOMPOSE_ABOVE,
        lambda: decomposed(center(rows), start - product(mean, rows), s.kappa),
        lambda: start - product(s.weights, rows),
    )
    return delta / s.a, s.rho


def on_host(
    theta0: np.ndarray, samples: np.ndarray, scale: float, shrink: Shrinkage
) -> tuple[np.ndarray, float]:
    """Δ̂ of all rows of `samples`, and ρ, in the arrays' precision; sums in float64."""
    ell, dim = samples.shape
    width = max(BLOCK // ell, 1)
    blocks = [slice(start, start + width) for start in range(0, dim, width)]

    def rows(block: slice) -> np.ndarray:
        part = samples[:, block].astype(np.float64)
        return part - part[-1]

    def center(y: np.ndarray) -> np.ndarray:
        return y - y.mean(0, keepdims=True)

    start = theta0.astype(np.float64) - samples[-1].astype(np.float64)
    gram, along = np.zeros((ell, ell)), np.zeros(ell)
    for block in blocks:
        part = rows(block)
        gram += part @ part.T
        along += part @ start[block]
    mean = np.full(ell, 1 / ell)
    s = solution(gram, along, center, mean, np.float64(ell), dim, np.float64(scale), shrink)
    # Sums in float64 leave nothing to gain for a float32 result.
    if theta0.dtype == np.float64 and s.largest > DECOMPOSE_ABOVE:
        deviations = rows(slice(0, dim))
        delta = decomposed(center(deviations), start - mean @ deviations, s.kappa)
    else:
        delta = start - np.concatenate([s.weights @ rows(block) for block in blocks])
    return (delta / s.a).astype(theta0.dtype), float(s.rho)
