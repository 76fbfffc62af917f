"""The posterior delta in Gram form: Theorem 3 by one ℓ×d by d×ℓ product and an ℓ×ℓ system.

With X the ℓ×d matrix of samples minus their mean and b = x₀ − x̄, Σ̂ = a (I + r Ŝ) = a (I + κ XᵀX),
κ = r/(ℓ−1), and by the Woodbury identity

    Δ̂ = Σ̂⁻¹ b = (1/a) [b − κ Xᵀ (I_ℓ + κ XXᵀ)⁻¹ X b].

With the paper's shrinkage κ = ρ and 1/a = 1 + (ℓ−1)ρ. Numerics:

- Rows are differences to the last sample, E = x_j − x_ℓ and e = x₀ − x_ℓ, rather than to a rounded
  mean; one product of the augmented rows gives E Eᵀ and E e; centring happens in the ℓ×ℓ space.
- Rounding in XXᵀ alone would cost up to κ‖X‖² to the power 3/2 in relative error where x₀ − x̄ lies
  along the samples' spread (always for d < ℓ). Where λ_max(Σ̃) is large enough for that to matter,
  X itself is factored (QR form): slower, error at most ε·λ_max(Σ̃).
- For d < ℓ the QR form is of size d: Σ̃ = RᵀR, with R from [I; √κ X] = QR, and Δ̃ = R⁻¹R⁻ᵀb. Nothing
  cancels there: the error is ε times the condition number of Σ̃, which does not grow with ρ.

Two ways to run it: `on_device`, inside compiled programs, and `on_host`, NumPy with everything of
size ℓ×ℓ in float64, blocks of columns at a time. On the device nothing is left to LAPACK, whose
calls are slow for such small matrices, can't be vectorized over clients, and inside programs that
run in several threads at a time wait for each other for ever (`jnp.linalg.qr`, jaxlib 0.10.2).
"""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from threadpoolctl import ThreadpoolController

from fedpa.cores import cores
from fedpa.deltas.effective_samples import effective_samples, squared_steps
from fedpa.deltas.shrinkage import Moments, Shrinkage, coefficients
from fedpa.types import Scalar

FACTOR_ABOVE = 30.0
"""λ_max(Σ̃) beyond which X is factored rather than XXᵀ."""

SMALL = 1 << 20
"""Numbers up to which float64 throughout costs the host no time worth saving."""

BLOCK = 1 << 19
"""Numbers the host form works on at a time, in each thread."""


class Result(NamedTuple):
    delta: Any
    """Δ̂."""
    rho: Any
    ess: Any
    """See `fedpa.deltas.effective_samples`."""


def on_device(
    theta0: Float[Array, " d"],
    samples: Float[Array, "l d"],
    count: Scalar,
    scale: Scalar,
    shrink: Shrinkage,
) -> Result:
    """Δ̂ of the first `count` rows of `samples`. Traceable; the rest are masked exactly.

    `scale` multiplies the deviations X in the covariance.
    """

    @jax.custom_batching.custom_vmap
    def solved(given: Given) -> Result:
        gentle = _gentle(given, shrink)
        value = jax.lax.cond(gentle.steep, lambda: _steep(given, gentle), lambda: gentle.delta)
        return Result(value / gentle.a, gentle.rho, gentle.ess)

    @solved.def_vmap
    def _(size: int, batched: Any, given: Given) -> Any:
        # One branch for all lanes: a branch for each would be taken both ways by every lane.
        stacked = jax.tree.map(
            lambda x, has_axis: x if has_axis else jnp.broadcast_to(x, (size, *x.shape)),
            given,
            batched[0],
        )
        gentle = jax.vmap(lambda lane: _gentle(lane, shrink))(stacked)

        def mixed() -> Array:
            factored = jax.vmap(_steep)(stacked, gentle)
            return jnp.where(gentle.steep[:, None], factored, gentle.delta)

        value = jax.lax.cond(jnp.any(gentle.steep), mixed, lambda: gentle.delta)
        return Result(value / gentle.a[:, None], gentle.rho, gentle.ess), Result(True, True, True)

    return Result(*map(jnp.asarray, solved(Given(theta0, samples, count, scale))))


class Given(NamedTuple):
    theta0: Float[Array, " d"]
    samples: Float[Array, "l d"]
    number: Scalar
    scale: Scalar


class Gentle(NamedTuple):
    """Δ̃ = a Δ̂ from the Gram matrix, and what a second way to it needs to know."""

    delta: Float[Array, " d"]
    steep: Bool[Array, ""]
    """λ_max(Σ̃) is so large that it must be had otherwise."""
    kappa: Scalar
    a: Scalar
    """Σ̂ = a Σ̃."""
    rho: Scalar
    ess: Scalar


def _differences(
    theta0: Float[Array, " d"], samples: Float[Array, "l d"], count: Scalar
) -> tuple[Float[Array, "l1 d"], Float[Array, " l"]]:
    """E and, as the last row, e; and 1 for each sample that is there."""
    real = (jnp.arange(samples.shape[0], dtype=samples.dtype) < count).astype(samples.dtype)
    last = samples[jnp.maximum(count.astype(jnp.int32) - 1, 0)]
    mask = jnp.concatenate([real, jnp.ones(1, real.dtype)])
    rows = jnp.concatenate([samples, theta0[None, :]]) - last[None, :]
    return rows * mask[:, None], real


def _centered(y: Array, real: Float[Array, " l"], count: Scalar) -> Array:
    """y minus its mean over the samples that are there, so that X is E centred."""
    mask = real if y.ndim == 1 else real[:, None]
    return (y - (jnp.sum(y * mask, 0, keepdims=True) / count)) * mask


def _gentle(given: Given, shrink: Shrinkage) -> Gentle:
    """By the Gram matrix: right unless Σ̃ is steep."""
    theta0, samples, count, scale = given
    rows, real = _differences(theta0, samples, count)
    products = _product(rows, rows.T)
    gram, along = products[:-1, :-1], products[:-1, -1]
    spread = _centered(_centered(gram, real, count).T, real, count)
    degrees = jnp.maximum(count - 1, 1.0)
    trace = jnp.trace(spread) * scale**2 / degrees
    trace_of_square = jnp.sum((spread * scale**2 / degrees) ** 2)
    a, r, rho = coefficients(shrink, Moments(trace, trace_of_square, count, theta0.shape[0]))
    kappa = r / degrees * scale**2
    # b = e − Eᵀ1/ℓ, so X b is known here: E e − E Eᵀ1/ℓ, centred.
    mean = real / count
    onto = _centered(along - _product(gram, mean), real, count)
    system = jnp.eye(spread.shape[0], dtype=spread.dtype) + kappa * spread
    weights = mean + kappa * _centered(_solve(system, onto), real, count)
    delta = rows[-1] - _product(weights, rows[:-1])
    steep = 1 + kappa * _largest_bound(spread) > FACTOR_ABOVE
    ess = effective_samples(count, jnp.sum(squared_steps(gram) * real[1:]), jnp.trace(spread))
    return Gentle(delta, steep, kappa, a, rho, ess)


def _steep(given: Given, gentle: Gentle) -> Float[Array, " d"]:
    """Σ̃⁻¹b by QR; neither X Xᵀ nor XᵀX, whose rounding would be magnified, is ever formed.

    For d ≥ ℓ from X = L Q with orthonormal rows Q: b − Qᵀc + Qᵀz, c = Q b, (I + κ LᵀL) z = c.
    """
    theta0, samples, count, _ = given
    rows, real = _differences(theta0, samples, count)
    b = rows[-1] - _product(real / count, rows[:-1])
    deviations = _centered(rows[:-1], real, count)

    def solve(factor: Array, right: Array) -> Array:
        """(I + κ FᵀF)⁻¹ right = R⁻¹R⁻ᵀ right, [I; √κ F] = QR."""
        unit = jnp.eye(right.shape[0], dtype=right.dtype)
        stacked = jnp.concatenate([unit, jnp.sqrt(gentle.kappa) * factor])
        lower, _ = _factored(stacked.T)
        return _solve(lower.T, _solve(lower, right))

    if b.shape[0] < samples.shape[0]:
        return solve(deviations, b)
    lower, q = _factored(deviations)
    c = _product(q, b)
    return b + _product(solve(lower, c) - c, q)


def _factored(x: Float[Array, "l d"]) -> tuple[Float[Array, "l l"], Float[Array, "l d"]]:
    """X = L Q, Q's rows orthonormal (or 0 where X has no more rank), by Gram–Schmidt done twice."""
    eps = jnp.finfo(x.dtype).eps

    def body(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        lower, q = carry
        once = x[j] - _product(first := _product(q, x[j]), q)
        rest = once - _product(second := _product(q, once), q)
        norm = jnp.linalg.norm(rest)
        new = norm > 4 * eps * jnp.linalg.norm(x[j])
        q = q.at[j].set(jnp.where(new, rest / jnp.where(new, norm, 1), 0))
        return lower.at[j].set((first + second).at[j].set(jnp.where(new, norm, 0))), q

    size = x.shape[0]
    return jax.lax.fori_loop(0, size, body, (jnp.zeros((size, size), x.dtype), jnp.zeros_like(x)))


def _solve(system: Float[Array, "l l"], right: Float[Array, " l"]) -> Float[Array, " l"]:
    """Gauss–Jordan without pivots: for positive definite and triangular systems."""

    def body(j: Any, table: Array) -> Array:
        pivot = table[j] / table[j, j]
        return (table - table[:, j][:, None] * pivot[None, :]).at[j].set(pivot)

    table = jnp.concatenate([system, right[:, None]], axis=1)
    return jax.lax.fori_loop(0, right.shape[0], body, table)[:, -1]


def _largest_bound(symmetric: Float[Array, "l l"]) -> Scalar:
    """(tr A¹⁶)^(1/16): at least λ_max(A), and at most ℓ^(1/16) times it."""
    norm = jnp.linalg.norm(symmetric)
    power = symmetric / jnp.where(norm > 0, norm, 1)
    for _ in range(3):
        power = _product(power, power)
    return norm * jnp.linalg.norm(power) ** (1 / 8)


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def on_host(theta0: np.ndarray, samples: np.ndarray, scale: float, shrink: Shrinkage) -> Result:
    """Δ̂ of all rows of `samples`, in the arrays' precision; ℓ×ℓ numbers in float64."""
    ell, dim = samples.shape
    width = max(BLOCK // (ell + 1), 1)

    def rows(block: slice, out: np.ndarray) -> np.ndarray:
        """E, and e as the last row, of some columns."""
        out = out[:, : block.stop - block.start]
        np.subtract(samples[:, block], samples[-1, block], out=out[:-1], dtype=out.dtype)
        np.subtract(theta0[block], samples[-1, block], out=out[-1], dtype=out.dtype)
        return out

    def blocks(share: slice, dtype: Any) -> Iterator[tuple[slice, np.ndarray]]:
        """A share of the columns, block by block, all in one buffer."""
        buffer = np.empty((ell + 1, min(width, dim)), dtype)
        for start in range(share.start, share.stop, width):
            block = slice(start, min(start + width, share.stop))
            yield block, rows(block, buffer)

    def products(dtype: Any) -> np.ndarray:
        def product(share: slice) -> np.ndarray:
            total = np.zeros((ell + 1, ell + 1))
            for _, part in blocks(share, dtype):
                total += np.dot(part, part.T)  # unlike `@`, it lets other threads run
            return total

        return sum(_each(product, dim, width), np.zeros(()))

    def combined(weights: np.ndarray) -> np.ndarray:
        """weightsᵀ [E; e]."""
        values = np.empty(dim, weights.dtype)

        def combine(share: slice) -> None:
            for block, part in blocks(share, weights.dtype):
                values[block] = np.dot(weights, part)

        _each(combine, dim, width)
        return values

    dtype = np.dtype(np.float64) if samples.size <= SMALL else samples.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        s = _solution(products(dtype), dim, scale, shrink)
        if not s.largest <= FACTOR_ABOVE and dtype != np.float64:
            dtype = np.dtype(np.float64)
            s = _solution(products(dtype), dim, scale, shrink)
    # For a float32 result of d ≥ ℓ, many numbers, a Gram matrix in float64 is accurate enough, and
    # takes no second copy of the samples.
    small = dim < ell or samples.size <= SMALL
    if s.largest > FACTOR_ABOVE and (small or theta0.dtype == np.float64):
        whole = rows(slice(0, dim), np.empty((ell + 1, dim)))
        mean = whole[:-1].mean(0)
        delta = _factored_on_host(whole[:-1] - mean, whole[-1] - mean, s.kappa)
    else:
        delta = combined(np.append(-s.weights, 1.0).astype(dtype))
    value = (delta / s.a).astype(theta0.dtype, copy=False)
    return Result(value, float(s.rho), float(s.ess))


def _each(work: Callable[[slice], Any], dim: int, width: int) -> list[Any]:
    """work(share) for shares of the columns, one for each core, in order; BLAS in one thread each.

    (BLAS's own threads would share the products only, and products of so few rows badly.)
    """
    threads = cores()
    if dim < 4 * threads * width:
        return [work(slice(0, dim))]
    size = -(-dim // threads)
    shares = [slice(start, min(start + size, dim)) for start in range(0, dim, size)]
    # The limit holds for the whole process: two at a time would restore each other's.
    with _ONE_AT_A_TIME, _blas().limit(limits=1), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, shares))


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


class Solution(NamedTuple):
    """What follows from the Gram matrix, in float64."""

    weights: np.ndarray
    """w with Δ̃ = a Δ̂ = e − wᵀE."""
    kappa: np.floating
    largest: np.floating
    """λ_max(Σ̃) of Σ̃ = I + κ XᵀX."""
    a: Any
    """Σ̂ = a Σ̃."""
    rho: Any
    ess: Any


def _solution(products: np.ndarray, dim: int, scale: float, shrink: Shrinkage) -> Solution:
    """Choose ρ and solve, from the products of the rows of E and e."""
    gram, along = products[:-1, :-1], products[:-1, -1]
    ell = np.float64(len(along))

    def center(y: np.ndarray) -> np.ndarray:
        return y - y.mean(0, keepdims=True)

    if not np.isfinite(products).all():  # too large to square, or no numbers in the first place
        nothing = np.float64(np.nan)
        return Solution(np.full(len(along), np.nan), *[nothing] * 5)
    eigenvalues, vectors = np.linalg.eigh(center(center(gram).T))
    eigenvalues = np.maximum(eigenvalues, 0.0)
    ess = effective_samples(ell, squared_steps(gram, np).sum(), eigenvalues.sum(), np)
    eigenvalues = eigenvalues * scale**2
    degrees = max(ell - 1, np.float64(1))
    moments = Moments(eigenvalues.sum() / degrees, (eigenvalues**2).sum() / degrees**2, ell, dim)
    a, r, rho = coefficients(shrink, moments)
    spectrum = 1 + r / degrees * eigenvalues
    kappa = r / degrees * scale**2
    mean = np.full(len(along), 1 / ell)
    onto = vectors.T @ center(along - gram @ mean)
    weights = mean + kappa * center(vectors @ (onto / spectrum))
    return Solution(weights, kappa, np.max(spectrum), a, rho, ess)


def _factored_on_host(deviations: np.ndarray, b: np.ndarray, kappa: np.floating) -> np.ndarray:
    """Σ̃⁻¹ b by QR, as `_steep` on the device."""

    def solve(factor: np.ndarray, right: np.ndarray) -> np.ndarray:
        stacked = np.concatenate([np.eye(len(right)), np.sqrt(kappa) * factor])
        upper: np.ndarray = np.linalg.qr(stacked, mode="r")  # type: ignore[assignment]
        return np.linalg.solve(upper, np.linalg.solve(upper.T, right))

    ell, dim = deviations.shape
    if dim < ell:
        return solve(deviations, b)
    q, upper = np.linalg.qr(deviations.T)
    c = q.T @ b
    return b + q @ (solve(upper.T, c) - c)
