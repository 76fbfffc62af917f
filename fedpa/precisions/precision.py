"""What a Gaussian precision is: Σ⁻¹ of eq. 3, whatever its structure."""

from typing import Protocol, TypeVar, runtime_checkable

from jaxtyping import Array

from fedpa.types import Key, Scalar

P = TypeVar("P")


@runtime_checkable
class Precision(Protocol):
    """A Gaussian precision Λ = Σ⁻¹ over parameters v, an array (eq. 3).

    A structure is a NamedTuple of arrays with these methods: a pytree, so that it goes through
    `jit`, `vmap` and an aggregation as any result does. No method forms the d×d matrix.

    Args:
        v: Parameters, of the shape that the structure is over.
        like: The same; only its shape and dtype matter.
    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedpa.precisions import Kronecker
        >>> precision: Precision = Kronecker(4 * jnp.eye(2)[None])  # Λ = 4I over 2×3 matrices
        >>> precision.solve(jnp.ones((2, 3)))[0].tolist()
        [0.25, 0.25, 0.25]
        >>> precision.sample(jnp.ones((2, 3)), jax.random.key(0)).shape, precision.num_numbers
        ((2, 3), 3)
    """

    def add(self: P, other: P) -> P:
        """Λ + Λ′: of the product of the two densities."""
        ...

    def scale(self: P, factor: float | Scalar) -> P:
        """cΛ, c ≥ 0: of the density to the power of c."""
        ...

    def times(self, v: Array) -> Array:
        """Λv."""
        ...

    def solve(self, v: Array) -> Array:
        """Λ⁻¹v, for Λ positive definite."""
        ...

    def sample(self, like: Array, key: Key) -> Array:
        """One draw of N(0, Λ⁻¹), of the shape and dtype of `like`."""
        ...

    def logdet(self, like: Array) -> Scalar:
        """log det Λ over parameters of the shape of `like`."""
        ...

    @property
    def num_numbers(self) -> int:
        """How many numbers describe Λ: what is sent of it."""
        ...
