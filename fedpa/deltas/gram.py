"""The posterior delta in Gram form: Theorem 3 by one ℓ×d by d×ℓ product and an ℓ×ℓ system.

With X the ℓ×d matrix of samples minus their mean and b = x₀ − x̄, Σ̂ = a (I + r Ŝ) = a (I + κ XᵀX),
κ = r/(ℓ−1), and by the Woodbury identity

    Δ̂ = Σ̂⁻¹ b = (1/a) [b − κ Xᵀ (I_ℓ + κ XXᵀ)⁻¹ X b].

With the paper's shrinkage κ = ρ and 1/a = 1 + (ℓ−1)ρ. Numerics:

- Rows are differences to the last sample, E = x_j − x_ℓ and e = x₀ − x_ℓ, rather than to a rounded
  mean; centring happens in the ℓ×ℓ space.
- Rounding in XXᵀ alone would cost up to κ‖X‖² to the power 3/2 in relative error where x₀ − x̄ lies
  along the samples' spread (always for d < ℓ). Where that matters, steps of iterative refinement
  with the full operator bring the error back to that of a backward-stable solve, ε·λ_max(Σ̃).

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

REFINEMENTS = 2
REFINE_ABOVE = 30.0
"""λ_max(Σ̃) beyond which refinement is worth its passes over the samples."""

BLOCK = 1 << 17
"""Numbers the host form converts to float64 at a time: about what a core's cache holds."""


class Spread(NamedTuple):
    """E, the rows x_j − x_ℓ, seen through its products; NumPy or JAX."""

    gram: Any
    """E Eᵀ."""
    start: Any
    """e = x₀ − x_ℓ."""
    along: Any
    """E e."""
    project: Callable[[Any], Any]
    """v ↦ E v."""
    combine: Callable[[Any], Any]
    """w ↦ wᵀ E."""
    center: Callable[[Any], Any]
    """y ↦ H y, y minus its mean over the samples: X = H E."""
    mean: Any
    """The weights of the sample mean: 1/ℓ for each sample."""
    ell: Any
    """ℓ, as a floating-point number."""


class Solver(NamedTuple):
    """Σ̃ = I + κ XᵀX and its inverse as functions, from the eigenvalues of XXᵀ."""

    delta: Any
    """Δ̃ = Σ̃⁻¹ b, as good as it needs to be unless λ_max is large."""
    multiply: Callable[[Any], Any]
    solve: Callable[[Any], Any]
    largest: Any
    """λ_max(Σ̃)."""
    a: Any
    """Σ̂ = a Σ̃."""
    rho: Any


def solver(e: Spread, dim: int, scale: Any, shrink: Shrinkage) -> Solver:
    """Choose ρ and decompose, all in the ℓ×ℓ space. `scale` multiplies the deviations X."""
    xp = np if isinstance(e.gram, np.ndarray) else jnp
    eigenvalues, vectors = xp.linalg.eigh(e.center(e.center(e.gram).T))
    eigenvalues = xp.maximum(eigenvalues, 0.0) * scale**2
    degrees = xp.maximum(e.ell - 1, 1.0)
    moments = Moments(eigenvalues.sum() / degrees, (eigenvalues**2).sum() / degrees**2, e.ell, dim)
    a, r, rho = coefficients(shrink, moments)
    kappa = r / degrees
    spectrum = 1 + kappa * eigenvalues

    def multiply(v: Any) -> Any:
        """Σ̃ v = v + κ Xᵀ X v."""
        return v + kappa * scale**2 * e.combine(e.center(e.project(v)))

    def weights(y: Any) -> Any:
        """κ Hᵀ (I + κ XXᵀ)⁻¹ H y."""
        return kappa * scale**2 * e.center(vectors @ ((vectors.T @ e.center(y)) / spectrum))

    def solve(v: Any) -> Any:
        """Σ̃⁻¹ v = v − κ Xᵀ (I + κ XXᵀ)⁻¹ X v."""
        return v - e.combine(weights(e.project(v)))

    # With b = e − Eᵀ1/ℓ this is solve(b), in one pass over E: E b is known in the ℓ×ℓ space.
    delta = e.start - e.combine(e.mean + weights(e.along - e.gram @ e.mean))
    return Solver(delta, multiply, solve, xp.max(spectrum), a, rho)


def refine(s: Solver, b: Any) -> Any:
    """Solve Σ̃ Δ̃ = b with iterative refinement."""
    xp = np if isinstance(b, np.ndarray) else jnp

    def step(index: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        delta, residual = carry
        candidate = delta + s.solve(residual)
        remaining = b - s.multiply(candidate)
        # Beyond the precision's reach (ε·λ_max > 1) refinement diverges: keep the better.
        better = (index == 0) | (xp.sum(remaining**2) < xp.sum(residual**2))
        return xp.where(better, candidate, delta), xp.where(better, remaining, residual)

    # From Δ̃ = 0, whose residual is b: the first step is the plain solve.
    carry = (xp.zeros_like(b), b)
    if xp is jnp:  # a loop compiles once what Python would unroll
        return jax.lax.fori_loop(0, 1 + REFINEMENTS, step, carry)[0]
    for index in range(1 + REFINEMENTS):
        carry = step(index, carry)
    return carry[0]


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

    def product(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)

    def center(y: Array) -> Array:
        mask = real if y.ndim == 1 else real[:, None]
        return (y - (jnp.sum(y * mask, 0, keepdims=True) / count)) * mask

    start = theta0 - last
    e = Spread(
        product(rows, rows.T),
        start,
        along=product(rows, start),
        project=lambda v: product(rows, v),
        combine=lambda w: product(w, rows),
        center=center,
        mean=real / count,
        ell=count,
    )
    s = solver(e, theta0.shape[0], scale, shrink)
    delta = jax.lax.cond(
        s.largest > REFINE_ABOVE,
        lambda: refine(s, start - e.combine(e.mean)),
        lambda: s.delta,
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

    def combine(w: np.ndarray) -> np.ndarray:
        return np.concatenate([w @ rows(block) for block in blocks])

    start = theta0.astype(np.float64) - samples[-1].astype(np.float64)
    gram, along = np.zeros((ell, ell)), np.zeros(ell)
    for block in blocks:
        part = rows(block)
        gram += part @ part.T
        along += part @ start[block]
    e = Spread(
        gram,
        start,
        along,
        project=lambda v: sum((rows(block) @ v[block] for block in blocks), np.zeros(ell)),
        combine=combine,
        center=lambda y: y - y.mean(0, keepdims=True),
        mean=np.full(ell, 1 / ell),
        ell=np.float64(ell),
    )
    s = solver(e, dim, np.float64(scale), shrink)
    delta = s.delta
    # Sums in float64 leave nothing to refine in a float32 result.
    if theta0.dtype == np.float64 and s.largest > REFINE_ABOVE:
        delta = refine(s, start - combine(e.mean))
    return (delta / s.a).astype(theta0.dtype), float(s.rho)
