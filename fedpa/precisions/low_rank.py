"""Low-rank precisions, Λ = diag(δ) + UUᵀ: few steep directions over a diagonal.

With B = diag(δ)^{-1/2}U = QR, Q of orthonormal columns, and I + RRᵀ = LLᵀ,

    (I + BBᵀ)⁻¹ = (I − QQᵀ) + Q (LLᵀ)⁻¹ Qᵀ        log det (I + BBᵀ) = 2 Σ log L_jj

which is Woodbury's identity in B's own directions: O(r²d), no d×d matrix, and as accurate as a
dense solve where BᵀB itself would lose digits.

How clients' precisions become one: `add` concatenates columns, so that K clients of rank r are one
of rank Kr. Or each client sends Y_i = H_iΩ with one random d×s matrix Ω for all (`draw_directions`;
s Hessian-vector products). These add up, also in secure sums, to HΩ, H = Σ H_i, of which
`from_products` makes the Nyström approximation

    H ≈ Y (ΩᵀY)⁺ Yᵀ,   Y = HΩ

symmetric, never above H, and exact where H has rank s or less (Tropp, Yurtsever, Udell, Cevher:
Fixed-rank approximation of a positive-semidefinite matrix from streaming data, NeurIPS 2017).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import check_integer, refuse
from fedpa.lapack import cholesky, eigh, qr, solve_lower, solve_upper, svd
from fedpa.precisions.precision import Precision
from fedpa.types import Key, Scalar

Vector = Float[Array, " d"]
Columns = Float[Array, "d r"]


class LowRank(NamedTuple):
    """A Gaussian precision Λ = diag(δ) + UUᵀ over vectors, U of r columns.

    A `fedpa.Precision`. `solve`, `sample`, `logdet` and `variances` take O(r²d), `times` O(rd).

    Args:
        diagonal: δ > 0; 0 for a precision that is only added to others.
        columns: U.
    Example:
        >>> precision = LowRank(jnp.ones(3), jnp.array([[1.0], [0.0], [0.0]]))  # diag(2, 1, 1)
        >>> precision.solve(jnp.ones(3)).round(5).tolist()
        [0.5, 1.0, 1.0]
    """

    diagonal: Vector
    columns: Columns

    def add(self, other: "LowRank") -> "LowRank":
        """Λ + Λ′: the columns of both."""
        return LowRank(
            self.diagonal + other.diagonal,
            jnp.concatenate([self.columns, other.columns], axis=1),
        )

    def add_identity(self, factor: float | Scalar = 1.0) -> "LowRank":
        """Λ + cI."""
        return LowRank(self.diagonal + factor, self.columns)

    def scale(self, factor: float | Scalar) -> "LowRank":
        """cΛ, c ≥ 0."""
        return LowRank(factor * self.diagonal, jnp.sqrt(factor) * self.columns)

    def times(self, v: Vector) -> Vector:
        """Λv."""
        wide = v.astype(self.diagonal.dtype)
        return (self.diagonal * wide + self.columns @ (self.columns.T @ wide)).astype(v.dtype)

    def solve(self, v: Vector) -> Vector:
        """Λ⁻¹v, for δ > 0."""
        basis, lower, root = self._factors()

        def invert(inside: Columns) -> Columns:
            return solve_upper(lower, solve_lower(lower, inside))

        return (_apply(basis, invert, v.astype(root.dtype) / root) / root).astype(v.dtype)

    def sample(self, like: Vector, key: Key) -> Vector:
        """One draw of N(0, Λ⁻¹), of the dtype of `like`."""
        basis, lower, root = self._factors()
        noise = jax.random.normal(key, root.shape, root.dtype)
        draw = _apply(basis, lambda inside: solve_upper(lower, inside), noise)
        return (draw / root).astype(like.dtype)

    def logdet(self, like: Vector) -> Scalar:
        """log det Λ; `like` is not looked at."""
        _, lower, root = self._factors()
        return 2 * (jnp.sum(jnp.log(root)) + jnp.sum(jnp.log(jnp.diagonal(lower))))

    def variances(self, like: Vector) -> Vector:
        """The diagonal of Λ⁻¹, (1 − ‖q_j‖² + ‖L⁻¹q_j‖²)/δ_j, of the dtype of `like`.

        q_j are the rows of Q.
        """
        basis, lower, root = self._factors()
        outside = jnp.maximum(1 - jnp.sum(basis**2, axis=1), 0)  # rounding can make it negative
        inside = jnp.sum(solve_lower(lower, basis.T) ** 2, axis=0)
        return ((outside + inside) / root**2).astype(like.dtype)

    @property
    def num_numbers(self) -> int:
        """d + rd."""
        return self.diagonal.size + self.columns.size

    def _factors(self) -> tuple[Columns, Float[Array, "k k"], Vector]:
        """Q, L and √δ."""
        root = jnp.sqrt(self.diagonal)
        basis, right = qr(self.columns / root[:, None])
        identity = jnp.eye(len(right), dtype=right.dtype)
        return basis, cholesky(identity + right @ right.T), root


if TYPE_CHECKING:
    _: type[Precision] = LowRank


def _apply(basis: Columns, function: Callable[[Array], Array], v: Vector) -> Vector:
    """(I − QQᵀ)v + Q f(Qᵀv)."""
    inside = basis.T @ v
    return v + basis @ (function(inside[:, None])[:, 0] - inside)


def draw_directions(key: Key, d: int, rank: int, dtype: Any = jnp.float32) -> Columns:
    """Draw Ω, the directions in which every client multiplies its precision.

    Args:
        key: One for all clients.
        d: The number of parameters.
        rank: s, at most d: a few more than the steep directions that are expected.
        dtype: Of Ω.
    Returns:
        A d×s matrix of random orthonormal columns.
    Example:
        >>> omega = draw_directions(jax.random.key(0), 5, 2)
        >>> bool(jnp.allclose(omega.T @ omega, jnp.eye(2), atol=1e-5))
        True
    """
    check_integer("d", d, 1)
    check_integer("rank", rank, 1)
    if rank > d:
        raise refuse("rank", rank, f"must be at most d = {d}: fedpa.precisions.Dense has all of it")
    return qr(jax.random.normal(key, (d, rank), dtype))[0]


def from_products(products: Columns, directions: Columns, diagonal: Vector) -> LowRank:
    """Approximate diag(δ) + H from Y = HΩ, the sum of what clients sent (Nyström).

    Args:
        products: Y = Σ H_iΩ, each H_i symmetric and positive semidefinite.
        directions: Ω, from `draw_directions`.
        diagonal: δ, of the prior.
    Returns:
        Λ = diag(δ) + UUᵀ, UUᵀ ≈ H of the rank of Ω: exact for H of no higher rank, to rounding,
        which a few more directions than H's rank keep small.
    Example:
        >>> h = jnp.diag(jnp.array([3.0, 0.0, 0.0]))
        >>> omega = draw_directions(jax.random.key(0), 3, 2)
        >>> precision = from_products(h @ omega, omega, jnp.ones(3))
        >>> precision.times(jnp.ones(3)).round(3).tolist()
        [4.0, 1.0, 1.0]
    """
    # H + νI in H's place, ν at the rounding of Y: ΩᵀY has then no eigenvalue that is rounding
    # alone. ν is taken away again from the eigenvalues of what comes out.
    shift = jnp.sqrt(jnp.asarray(len(products), products.dtype)) * jnp.finfo(products.dtype).eps
    shift = shift * jnp.linalg.norm(products)
    shifted = products + shift * directions
    core = directions.T @ shifted
    values, vectors = eigh((core + core.T) / 2)
    usable = values > shift / 2
    root = jnp.where(usable, 1 / jnp.sqrt(jnp.where(usable, values, 1)), 0)
    basis, sigma, _ = svd((shifted @ vectors) * root[None, :])
    return LowRank(diagonal, basis * jnp.sqrt(jnp.maximum(sigma**2 - shift, 0))[None, :])
