"""The posterior delta in Gram form: Theorem 3 by one ℓ×d by d×ℓ product and an ℓ×ℓ system.

With X the ℓ×d matrix of samples minus their mean and b = x₀ − x̄, Σ̂ = a (I + r Ŝ) = a (I + κ XᵀX),
κ = r/(ℓ−1), and by the Woodbury identity

    Δ̂ = Σ̂⁻¹ b = (1/a) [b − κ Xᵀ (I_ℓ + κ XXᵀ)⁻¹ X b].

With the paper's shrinkage κ = ρ and 1/a = 1 + (ℓ−1)ρ. Rows are differences to the last sample,
E = x_j − x_ℓ and e = x₀ − x_ℓ, rather than to a rounded mean; centring happens in the ℓ×ℓ space.

Rounding in XXᵀ would cost up to λ_max(Σ̃)^{3/2}, Σ̃ = I + κXᵀX, where x₀ − x̄ lies along the samples'
spread (always for d < ℓ). Where Σ̃ is that steep X itself is factored by QR: as accurate as a
backward-stable dense solve, a relative error of about ε·λ_max(Σ̃)/λ_min(Σ̃).

The same code serves NumPy and JAX arrays, compiled or not; for NumPy arrays it does not import JAX.
Vectorized over clients, it runs one client after the other (`fedpa.lapack` says why), so that only
steep clients pay for QR.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fedpa.deltas.shrinkage import Moments, Shrinkage, array_namespace, coefficients

STEEP = 30.0
"""λ_max(Σ̃) beyond which X is factored rather than XXᵀ."""
SMALL, BLOCK = 10**6, 2**14
"""Multiplications up to which BLAS is faster in one call; otherwise parameters per block, so that
differences fit a processor's cache."""


class Differences(NamedTuple):
    """E and e, as far as they are needed."""

    gram: Any
    """E Eᵀ."""
    along: Any
    """E e."""
    combine: Callable[[Any], Any]
    """w → e − Eᵀw."""
    rows: Callable[[], tuple[Any, Any]]
    """E and e themselves."""


class Result(NamedTuple):
    delta: Any
    """Δ̂."""
    rho: Any
    ess: Any
    """Effective sample size (`effective_samples`)."""


def solve(
    theta0: Any, samples: Any, shrink: Shrinkage, scale: Any = 1.0, count: Any = None
) -> Result:
    """Compute Δ̂ from the rows of `samples`.

    Args:
        theta0: x₀, shape (d,), NumPy or JAX, as are the samples.
        samples: Shape (ℓ, d).
        shrink: How Σ̂ is shrunk.
        scale: Multiplies the deviations X in the covariance.
        count: How many rows are samples, a floating-point number; the rest are ignored. Default: ℓ.
    """
    xp = array_namespace(samples)
    count = xp.asarray(samples.shape[0], dtype=samples.dtype) if count is None else count
    if xp is np:
        return _solve(theta0, samples, shrink, scale, count)
    from fedpa.lapack import one_by_one

    @one_by_one
    def run(theta0: Any, samples: Any, scale: Any, count: Any) -> Result:
        return _solve(theta0, samples, shrink, scale, count)

    return Result(*run(theta0, samples, xp.asarray(scale, dtype=samples.dtype), count))


def _solve(theta0: Any, samples: Any, shrink: Shrinkage, scale: Any, count: Any) -> Result:
    xp = array_namespace(samples)
    ell, dim = samples.shape
    real = (xp.arange(ell, dtype=samples.dtype) < count).astype(samples.dtype)
    take = _take_in_blocks if xp is np else _take_at_once
    gram, along, combine, differences = take(theta0, samples, real, count)

    def center(y: Any) -> Any:
        mask = real if y.ndim == 1 else real[:, None]
        return (y - xp.sum(y * mask, axis=0, keepdims=True) / count) * mask

    spread = center(center(gram).T)
    degrees = xp.maximum(count - 1, 1.0)
    covariance = spread * scale**2 / degrees
    moments = Moments(xp.trace(covariance), xp.sum(covariance**2), count, dim)
    a, r, rho = coefficients(shrink, moments)
    kappa = r / degrees * scale**2
    mean = real / count

    def from_gram() -> Any:
        # b = e − Eᵀ1/ℓ, so X b is known here: E e − E Eᵀ1/ℓ, centred.
        onto = center(along - _product(gram, mean))
        system = xp.eye(ell, dtype=spread.dtype) + kappa * spread
        weights = mean + kappa * center(xp.linalg.solve(system, onto[:, None])[:, 0])
        return combine(weights.astype(samples.dtype))

    def from_factors() -> Any:
        rows, e = differences()
        b = e - _product(mean, rows)
        return _solve_by_qr(center(rows), b, kappa.astype(rows.dtype), xp)

    steep = 1 + kappa * xp.linalg.norm(spread) > STEEP
    delta = _choose(steep, from_factors, from_gram)
    squares = xp.diagonal(gram)
    steps = squares[1:] + squares[:-1] - 2 * xp.diagonal(gram, 1)
    ess = effective_samples(count, xp.sum(steps * real[1:]), xp.trace(spread))
    return Result(delta / xp.asarray(a, dtype=delta.dtype), rho, ess)


def _take_at_once(theta0: Any, samples: Any, real: Any, count: Any) -> Differences:
    import jax

    last = samples[jax.numpy.maximum(count.astype(int) - 1, 0)]
    rows, e = (samples - last[None, :]) * real[:, None], theta0 - last
    return Differences(
        _product(rows, rows.T),
        _product(rows, e),
        lambda weights: e - _product(weights, rows),
        lambda: (rows, e),
    )


def _take_in_blocks(theta0: Any, samples: Any, real: Any, count: Any) -> Differences:
    """Sums over blocks in float64, for NumPy; all rows are samples."""
    ell, dim = samples.shape
    small = SMALL // (ell * (ell + 1))
    size = min(small if 2**11 < small < BLOCK else BLOCK, dim)
    buffer = np.empty((ell + 1) * size, samples.dtype)

    def blocks() -> Iterator[tuple[slice, np.ndarray]]:
        """E, and e below it, of one block after the other, in the same memory."""
        for start in range(0, dim, size):
            block = slice(start, min(start + size, dim))
            both = buffer[: (ell + 1) * (block.stop - start)].reshape(ell + 1, -1)
            np.subtract(samples[:, block], samples[-1, block], out=both[:-1])
            np.subtract(theta0[block], samples[-1, block], out=both[-1])
            yield block, both

    products = np.zeros((ell + 1, ell))
    for _, both in blocks():
        products += np.dot(both, both[:-1].T)

    def combine(weights: Any) -> Any:
        combined, signed = np.empty(dim, samples.dtype), np.append(-weights, weights.dtype.type(1))
        for block, both in blocks():
            np.dot(signed, both, out=combined[block])
        return combined

    return Differences(
        products[:-1],
        products[-1],
        combine,
        lambda: (samples - samples[-1], theta0 - samples[-1]),
    )


def _solve_by_qr(x: Any, b: Any, kappa: Any, xp: Any) -> Any:
    """Solve for Σ̃⁻¹b by QR; neither XᵀX nor XXᵀ, whose rounding would be magnified, is ever formed.

    d ≤ ℓ: [I; √κ X] = Q R, Σ̃ = RᵀR. Else Xᵀ = Q R, and Σ̃⁻¹b = b − Qc + Qz with c = Qᵀb, where z is
    the least-squares solution of [I; √κ Rᵀ] z = [c; 0].
    """
    ell, dim = x.shape
    root = xp.sqrt(kappa)
    if dim <= ell:
        r = xp.linalg.qr(xp.concatenate([xp.eye(dim, dtype=x.dtype), root * x]), mode="r")
        return xp.linalg.solve(r, xp.linalg.solve(r.T, b[:, None]))[:, 0]
    q, r = xp.linalg.qr(x.T)
    c = _product(q.T, b)
    basis, upper = xp.linalg.qr(xp.concatenate([xp.eye(ell, dtype=x.dtype), root * r.T]))
    z = xp.linalg.solve(upper, _product(basis[:ell].T, c)[:, None])[:, 0]
    return b + _product(q, z - c)


def _product(x: Any, y: Any) -> Any:
    """x @ y; on accelerators in full precision."""
    if isinstance(x, np.ndarray):
        return np.dot(x, y)
    return x.__array_namespace__().matmul(x, y, precision="highest")


def _choose(steep: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if isinstance(steep, np.generic):
        return yes() if steep else no()
    import jax

    usual = no()  # before the branch: in one, XLA takes three times as long for it on CPUs
    return jax.lax.cond(steep, yes, lambda: usual)


def effective_samples(count: Any, steps: Any, spread: Any) -> Any:
    """Estimate the effective sample size of ℓ = `count` samples from their steps.

        r₁ = 1 − ½ Σ_s ‖x_{s+1} − x_s‖² / Σ_s ‖x_s − x̄‖²,  ESS = ℓ (1 − r₁)/(1 + r₁),  1 ≤ ESS ≤ ℓ

    r₁ is the autocorrelation at lag one over all parameters jointly (von Neumann's ratio), the rest
    follows for an AR(1) chain. Samples that still move from θ₀ to the client's optimum have r₁ near
    1 and count as one: their spread is the path's, not the posterior's. A single client's number is
    rough, a cohort's mean is not. (`fedpa.samplers.diagnose` is for long chains.)

    Args:
        count: ℓ.
        steps: Σ ‖x_{s+1} − x_s‖².
        spread: Σ ‖x_s − x̄‖².
    """
    xp = array_namespace(spread)
    moved = spread > 0
    ratio = xp.where(moved, steps / (2 * xp.where(moved, spread, 1)), 0)
    worth = count * ratio / xp.where(ratio < 2, 2 - ratio, 1)
    return xp.clip(xp.where(ratio < 2, worth, count), xp.minimum(count, 1), count)
