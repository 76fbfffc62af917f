"""The diagonal precision: one number for each parameter."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact

from fedpa.precisions.precision import Precision
from fedpa.types import Key, Scalar

Numbers = Inexact[Array, "..."]


class Diagonal(NamedTuple):
    """A Gaussian precision Λ = diag(δ) over arrays of any shape.

    A `fedpa.Precision`: Λv is δ·v entry by entry, and log det Λ is Σ log δ.

    Args:
        values: δ, of the shape of the parameters.
    Example:
        >>> precision = Diagonal(jnp.array([1.0, 4.0]))
        >>> precision.solve(jnp.ones(2)).tolist()
        [1.0, 0.25]
    """

    values: Numbers

    def add(self, other: "Diagonal") -> "Diagonal":
        """Λ + Λ′, of the same shape."""
        return Diagonal(self.values + other.values)

    def add_identity(self, factor: float | Scalar = 1.0) -> "Diagonal":
        """Λ + cI."""
        return Diagonal(self.values + factor)

    def scale(self, factor: float | Scalar) -> "Diagonal":
        """cΛ."""
        return Diagonal(factor * self.values)

    def times(self, v: Array) -> Array:
        """Λv."""
        return (self.values * v.astype(self.values.dtype)).astype(v.dtype)

    def solve(self, v: Array) -> Array:
        """Λ⁻¹v, for δ > 0."""
        return (v.astype(self.values.dtype) / self.values).astype(v.dtype)

    def sample(self, like: Array, key: Key) -> Array:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        noise = jax.random.normal(key, self.values.shape, self.values.dtype)
        return (noise / jnp.sqrt(self.values)).astype(like.dtype)

    def logdet(self, like: Array) -> Scalar:
        """log det Λ; `like` is not looked at."""
        return jnp.sum(jnp.log(self.values))

    def variances(self, like: Array) -> Array:
        """1/δ, of the dtype of `like`."""
        return (1 / self.values).astype(like.dtype)

    @property
    def num_numbers(self) -> int:
        """As many as there are parameters."""
        return self.values.size


if TYPE_CHECKING:
    _: type[Precision] = Diagonal
