"""The dense precision: a d×d matrix, for models of up to some thousand parameters."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.lapack import cholesky, solve_lower, solve_upper
from fedpa.precisions.precision import Precision
from fedpa.types import Key, Scalar

Vector = Float[Array, " d"]


class Dense(NamedTuple):
    """A Gaussian precision Λ over vectors, as its d×d matrix.

    A `fedpa.Precision`. `solve`, `sample`, `logdet` and `variances` take Λ = LLᵀ, O(d³), and give
    not-a-number where Λ is not positive definite. Vectorized over draws or right-hand sides only,
    the factor is made once.

    Args:
        matrix: Λ, symmetric.
    Example:
        >>> precision = Dense(jnp.array([[2.0, 1.0], [1.0, 2.0]]))
        >>> precision.times(precision.solve(jnp.ones(2))).round(5).tolist()
        [1.0, 1.0]
    """

    matrix: Float[Array, "d d"]

    def add(self, other: "Dense") -> "Dense":
        """Λ + Λ′, of the same d."""
        return Dense(self.matrix + other.matrix)

    def add_identity(self, factor: float | Scalar = 1.0) -> "Dense":
        """Λ + cI."""
        return Dense(self.matrix + factor * jnp.eye(len(self.matrix), dtype=self.matrix.dtype))

    def scale(self, factor: float | Scalar) -> "Dense":
        """cΛ."""
        return Dense(factor * self.matrix)

    def times(self, v: Vector) -> Vector:
        """Λv."""
        return (self.matrix @ v.astype(self.matrix.dtype)).astype(v.dtype)

    def solve(self, v: Vector) -> Vector:
        """Λ⁻¹v, for Λ positive definite."""
        lower = cholesky(self.matrix)
        column = v.astype(lower.dtype)[:, None]
        return solve_upper(lower, solve_lower(lower, column))[:, 0].astype(v.dtype)

    def sample(self, like: Vector, key: Key) -> Vector:
        """One draw of N(0, Λ⁻¹), of the dtype of `like`."""
        noise = jax.random.normal(key, (len(self.matrix), 1), self.matrix.dtype)
        return solve_upper(cholesky(self.matrix), noise)[:, 0].astype(like.dtype)

    def logdet(self, like: Vector) -> Scalar:
        """log det Λ; `like` is not looked at."""
        return 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky(self.matrix))))

    def variances(self, like: Vector) -> Vector:
        """The diagonal of Λ⁻¹ = L⁻ᵀL⁻¹, of the dtype of `like`."""
        identity = jnp.eye(len(self.matrix), dtype=self.matrix.dtype)
        inverse = solve_lower(cholesky(self.matrix), identity)
        return jnp.sum(inverse**2, axis=0).astype(like.dtype)

    @property
    def num_numbers(self) -> int:
        """d(d + 1)/2: the upper triangle."""
        d = len(self.matrix)
        return d * (d + 1) // 2


if TYPE_CHECKING:
    _: type[Precision] = Dense
