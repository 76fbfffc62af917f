"""Gaussians in natural parameters: products add, powers scale (eq. 3).

    N(μ, Λ⁻¹) ∝ exp(ηᵀθ − ½θᵀΛθ),   η = Λμ

The product of densities adds η and Λ, which is eq. 3: μ = (Σ Λ_i)⁻¹ Σ Λ_i μ_i. A quotient of two
may have a Λ that is not positive definite: it is no density of its own.
"""

from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpa.errors import FedpaError
from fedpa.lapack import cholesky, solve_lower
from fedpa.precisions.dense import Dense
from fedpa.precisions.diagonal import Diagonal
from fedpa.types import Key, Scalar

Vector = Float[Array, " d"]
Structure = Literal["dense", "diagonal"]
"""Which entries of Λ are kept."""
G = TypeVar("G", bound="Gaussian")


class Gaussian(NamedTuple):
    """A Gaussian over vectors by η = Λμ and Λ: ∝ exp(ηᵀθ − ½θᵀΛθ).

    Args:
        eta: η = Λμ.
        precision: Λ.
    Example:
        >>> one = Gaussian(jnp.array([2.0]), Dense(jnp.array([[2.0]])))  # N(1, 1/2)
        >>> two = Gaussian(jnp.array([0.0]), Dense(jnp.array([[6.0]])))  # N(0, 1/6)
        >>> both = one.times(two)
        >>> both.mean.round(3).tolist(), both.precision.matrix.tolist()
        ([0.25], [[8.0]])
    """

    eta: Vector
    precision: Dense | Diagonal

    @property
    def mean(self) -> Vector:
        """μ = Λ⁻¹η; not-a-number where Λ is not positive definite."""
        return self.precision.solve(self.eta)

    @property
    def sd(self) -> Vector:
        """The square roots of Λ⁻¹'s diagonal: each coordinate's standard deviation."""
        if isinstance(self.precision, Diagonal):
            return 1 / jnp.sqrt(self.precision.values)
        lengths: Vector = jnp.linalg.norm(self.root, axis=1)
        return lengths

    @property
    def root(self) -> Float[Array, "d d"]:
        """R = L⁻ᵀ of Λ = LLᵀ: μ + Rz is a draw for z ~ N(0, I), and RRᵀ the covariance."""
        if isinstance(self.precision, Diagonal):
            raise FedpaError("a diagonal Gaussian has no dense root: divide by √δ")
        matrix = self.precision.matrix
        return solve_lower(cholesky(matrix), jnp.eye(len(matrix), dtype=matrix.dtype)).T

    @property
    def is_proper(self) -> Bool[Array, ""]:
        """Whether Λ is positive definite and all is finite."""
        if isinstance(self.precision, Diagonal):
            definite = jnp.all(self.precision.values > 0)
        else:
            definite = jnp.all(jnp.isfinite(cholesky(self.precision.matrix)))
        return definite & jnp.all(jnp.isfinite(self.eta))

    def times(self: G, other: G) -> G:
        """The product of the two densities."""
        product: G = jax.tree.map(jnp.add, self, other)
        return product

    def divide(self: G, other: G) -> G:
        """The quotient of the two densities."""
        quotient: G = jax.tree.map(jnp.subtract, self, other)
        return quotient

    def power(self: G, exponent: float | Scalar) -> G:
        """The density to a power."""
        power: G = jax.tree.map(lambda x: exponent * x, self)
        return power

    def log_density(self, v: Vector) -> Scalar:
        """ηᵀv − ½vᵀΛv: the logarithm of the density at v, up to a constant."""
        return jnp.vdot(self.eta - 0.5 * self.precision.times(v), v)

    def sample(self, key: Key, num: int) -> Float[Array, "s d"]:
        """Draw vectors."""
        return self.draw(jax.random.normal(key, (num, len(self.eta)), self.eta.dtype))

    def covariances(self, rows: Float[Array, "b k d"]) -> Float[Array, "b k k"]:
        """JΛ⁻¹Jᵀ of each of b matrices J."""
        solved = jax.vmap(self.precision.solve)(rows.reshape(-1, len(self.eta)))
        return jnp.einsum("bkd,bld->bkl", rows, solved.reshape(rows.shape))

    def draw(self, noise: Float[Array, "s d"]) -> Float[Array, "s d"]:
        """μ + Rz for each row z of `noise`."""
        if isinstance(self.precision, Diagonal):
            return self.mean[None] + noise * self.sd[None]
        return self.mean[None] + noise @ self.root.T


def spread(diagonal: Vector, structure: Structure) -> Dense | Diagonal:
    """The precision of this diagonal, in a structure.

    Example:
        >>> spread(jnp.ones(2), "dense").matrix.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return Diagonal(diagonal) if structure == "diagonal" else Dense(jnp.diag(diagonal))
