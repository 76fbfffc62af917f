"""What a Gaussian precision is: Σ⁻¹ of eq. 3, whatever its structure."""

from typing import Any, Protocol, TypeVar, runtime_checkable

from fedpa.types import Key, Scalar

P = TypeVar("P")


@runtime_checkable
class Precision(Protocol):
    """A Gaussian precision Λ = Σ⁻¹ over parameters v (eq. 3).

    A structure is a NamedTuple of arrays with these methods: a pytree, so that it goes through
    `jit`, `vmap` and an aggregation as any result does. `Dense` alone forms the d×d matrix. What is
    computed is in the structure's dtype, which should be at least float32; results have the dtype
    of v.

    Args:
        v: Parameters, of the shape that the structure is over: an array, or for `Layered` a pytree.
        like: The same; only its shapes and dtypes matter. Λ = λI has no other way to know them.
    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedpa.precisions import Kronecker
        >>> precision: Precision = Kronecker(4 * jnp.eye(2)[None])  # Λ = 4I over 2×3 matrices
        >>> precision.solve(jnp.ones((2, 3)))[0].tolist()
        [0.25, 0.25, 0.25]
        >>> precision.sample(jnp.ones((2, 3)), jax.random.key(0)).shape, precision.num_numbers
        ((2, 3), 3)
        >>> precision.variances(jnp.ones((2, 3)))[0].tolist()
        [0.25, 0.25, 0.25]
    """

    def add(self: P, other: P) -> P:
        """Λ + Λ′: of the product of the two densities."""
        ...

    def add_identity(self: P, factor: float | Scalar = 1.0) -> P:
        """Λ + cI: of the density times a prior of precision c around the same mean."""
        ...

    def scale(self: P, factor: float | Scalar) -> P:
        """cΛ, c ≥ 0: of the density to the power of c."""
        ...

    def times(self, v: Any) -> Any:
        """Λv."""
        ...

    def solve(self, v: Any) -> Any:
        """Λ⁻¹v, for Λ positive definite."""
        ...

    def sample(self, like: Any, key: Key) -> Any:
        """One draw of N(0, Λ⁻¹), of the shapes and dtypes of `like`."""
        ...

    def logdet(self, like: Any) -> Scalar:
        """log det Λ over parameters of the shape of `like`."""
        ...

    def variances(self, like: Any) -> Any:
        """The diagonal of Λ⁻¹: each parameter's variance, of the shapes and dtypes of `like`."""
        ...

    @property
    def num_numbers(self) -> int:
        """How many numbers describe Λ, a symmetric matrix's triangle counted once: what is sent."""
        ...
