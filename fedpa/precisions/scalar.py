"""The scalar precision, Λ = λI: one number for all parameters, as a prior of one sd has it."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fedpa.precisions.precision import Precision
from fedpa.types import Key
from fedpa.types import Scalar as Number


class Scalar(NamedTuple):
    """A Gaussian precision Λ = λI over arrays of any shape.

    A `fedpa.Precision`: Λv is λv, and log det Λ is d log λ over d numbers.

    Args:
        value: λ; 1/sd² of a prior.
    Example:
        >>> prior = Scalar(jnp.float32(4.0))  # sd 0.5
        >>> prior.solve(jnp.ones((2, 3)))[0].tolist()
        [0.25, 0.25, 0.25]
    """

    value: Number

    def add(self, other: "Scalar") -> "Scalar":
        """Λ + Λ′."""
        return Scalar(self.value + other.value)

    def add_identity(self, factor: float | Number = 1.0) -> "Scalar":
        """Λ + cI."""
        return Scalar(self.value + factor)

    def scale(self, factor: float | Number) -> "Scalar":
        """cΛ."""
        return Scalar(factor * self.value)

    def times(self, v: Array) -> Array:
        """Λv."""
        return (self.value * v.astype(self.value.dtype)).astype(v.dtype)

    def solve(self, v: Array) -> Array:
        """Λ⁻¹v, for λ > 0."""
        return (v.astype(self.value.dtype) / self.value).astype(v.dtype)

    def sample(self, like: Array, key: Key) -> Array:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        noise = jax.random.normal(key, like.shape, self.value.dtype)
        return (noise / jnp.sqrt(self.value)).astype(like.dtype)

    def logdet(self, like: Array) -> Number:
        """log det Λ over arrays of the shape of `like`."""
        return like.size * jnp.log(self.value)

    def variances(self, like: Array) -> Array:
        """1/λ for each number of `like`."""
        return jnp.full(like.shape, 1 / self.value).astype(like.dtype)

    @property
    def num_numbers(self) -> int:
        """One."""
        return 1


if TYPE_CHECKING:
    _: type[Precision] = Scalar
