"""A density over a model's parameters, ravelled to one vector: what a `Posterior` is made of.

    Gaussian   N(Λ⁻¹η, Λ⁻¹)             of `fedpa.infer`: products of sites
    Normal     N(θ*, Λ⁻¹)               of `fedpa.laplace_posterior`, Λ of any structure
    Swag       N(θ̄, ½(diag(σ²) + DDᵀ/(K − 1)))    of K server iterates
    Ensemble   1/S Σ_s δ(θ − θ_s)       of S models

Each of them can be sampled, and has the covariance JΣJᵀ of a function linearized at its mean.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpa.precision import ravel, widen
from fedpa.precisions.gaussian import Gaussian
from fedpa.types import Key, Params, Scalar

Vector = Float[Array, " d"]
Draws = Float[Array, "s d"]
Rows = Float[Array, "b k d"]
"""Derivatives of k outputs for each of b examples."""
Covariances = Float[Array, "b k k"]
D = TypeVar("D")


@runtime_checkable
class Density(Protocol):
    """A density over vectors of d numbers.

    Args:
        key: The draws' randomness.
        num: How many draws.
        rows: J, shape (b, k, d).
    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fedpa.precisions import Diagonal
        >>> density: Density = Normal(jnp.zeros(2), Diagonal(jnp.array([1.0, 4.0])))
        >>> density.sd.tolist(), density.sample(jax.random.key(0), 3).shape
        ([1.0, 0.5], (3, 2))
    """

    @property
    def mean(self) -> Vector:
        """E[θ]."""
        ...

    @property
    def sd(self) -> Vector:
        """The square roots of the diagonal of Cov[θ]."""
        ...

    @property
    def is_proper(self) -> Bool[Array, ""]:
        """Whether it is a density, and all of it is finite."""
        ...

    def sample(self, key: Key, num: int) -> Draws:
        """Draw vectors."""
        ...

    def covariances(self, rows: Rows) -> Covariances:
        """JΣJᵀ of each of b examples, Σ = Cov[θ]."""
        ...


class Normal(NamedTuple):
    """N(θ*, Λ⁻¹), Λ of any structure of `fedpa.precisions`.

    Args:
        center: θ*, of the shape that the precision is over: a vector, or a pytree for `Layered`.
        precision: Λ; one that is factorized makes draws cheap.
    Example:
        >>> density = Normal(jnp.array([1.0, 2.0]), fedpa.precisions.Scalar(jnp.float32(4.0)))
        >>> density.mean.tolist(), density.sd.tolist()
        ([1.0, 2.0], [0.5, 0.5])
    """

    center: Params
    precision: Any

    @property
    def mean(self) -> Vector:
        """θ* as a vector."""
        return ravel(self.center)[0]

    @property
    def variances(self) -> Vector:
        """The diagonal of Λ⁻¹."""
        variances: Vector = ravel(self.precision.variances(widen(self.center)))[0]
        return variances

    @property
    def sd(self) -> Vector:
        """Each coordinate's standard deviation."""
        return jnp.sqrt(self.variances)

    @property
    def is_proper(self) -> Bool[Array, ""]:
        """Whether all variances are positive and finite."""
        variances = self.variances
        return jnp.all(jnp.isfinite(variances) & (variances > 0)) & jnp.all(jnp.isfinite(self.mean))

    def sample(self, key: Key, num: int) -> Draws:
        """θ* plus draws of N(0, Λ⁻¹)."""
        keys = jax.random.split(key, num)
        draws: Draws = _sample(self.precision, widen(self.center), self.mean, keys)
        return draws

    def covariances(self, rows: Rows) -> Covariances:
        """JΛ⁻¹Jᵀ, by a solve for each row of J."""
        _, restore = ravel(widen(self.center))
        flat = rows.reshape(-1, rows.shape[-1])
        solved = jax.vmap(lambda row: ravel(self.precision.solve(restore(row)))[0])(flat)
        return _multiply(rows, solved.reshape(rows.shape))


@jax.jit
def _sample(precision: Any, like: Params, mean: Vector, keys: Any) -> Draws:
    """One after the other: a precision's factor is made once, and memory is that of the draws."""
    draws: Draws = jax.lax.map(lambda key: mean + ravel(precision.sample(like, key))[0], keys)
    return draws


def _multiply(rows: Rows, others: Rows) -> Covariances:
    products: Covariances = jnp.einsum("bkd,bld->bkl", rows, others)
    return products


class Ensemble(NamedTuple):
    """Equal weights on S models: draws of a sampler, or runs of several seeds.

    Args:
        draws: θ_1 … θ_S.
    Example:
        >>> density = Ensemble(jnp.array([[1.0, 0.0], [3.0, 0.0]]))
        >>> density.mean.tolist(), density.sd.tolist()
        ([2.0, 0.0], [1.0, 0.0])
    """

    draws: Draws

    @property
    def mean(self) -> Vector:
        """The models' mean."""
        return jnp.mean(self.draws, axis=0)

    @property
    def sd(self) -> Vector:
        """The models' standard deviations, with divisor S."""
        return jnp.std(self.draws, axis=0)

    @property
    def is_proper(self) -> Bool[Array, ""]:
        """Whether all numbers are finite."""
        return jnp.all(jnp.isfinite(self.draws))

    def sample(self, key: Key, num: int) -> Draws:
        """All models, in a random order, as often as it takes: S draws have each of them once."""
        order = jax.random.permutation(key, jnp.arange(len(self.draws), dtype=jnp.int32))
        return self.draws[jnp.resize(order, (num,))]

    def covariances(self, rows: Rows) -> Covariances:
        """JΣJᵀ, Σ the models' covariance."""
        along = rows @ (self.draws - self.mean[None]).T
        return _multiply(along, along) / len(self.draws)


class Swag(NamedTuple):
    """SWAG: N(θ̄, ½(diag(σ²) + DDᵀ/(K − 1))), of iterates late in training (Maddox et al., 2019).

    θ̄ and σ² are mean and variance of the iterates, the K columns of D the latest iterates'
    deviations from the mean at their time.

    Args:
        center: θ̄.
        variances: σ².
        deviations: Dᵀ, a row for each of the K latest iterates.
        scale: Multiplies the covariance; 1 is SWAG's.
    Example:
        >>> density = Swag(jnp.zeros(2), jnp.ones(2), jnp.array([[1.0, 0.0], [-1.0, 0.0]]))
        >>> density.covariances(jnp.eye(2)[None])[0].tolist()
        [[1.5, 0.0], [0.0, 0.5]]
    """

    center: Vector
    variances: Vector
    deviations: Draws
    scale: Scalar | float = 1.0

    @property
    def mean(self) -> Vector:
        """θ̄."""
        return self.center

    @property
    def sd(self) -> Vector:
        """√(½(σ² + Σ_k D_k²/(K − 1)))."""
        low_rank = jnp.sum(self.deviations**2, axis=0) / (len(self.deviations) - 1)
        return jnp.sqrt(0.5 * self.scale * (self.variances + low_rank))

    @property
    def is_proper(self) -> Bool[Array, ""]:
        """Whether all numbers are finite, and some variance is positive."""
        return jnp.all(jnp.isfinite(self.sd)) & jnp.any(self.sd > 0)

    def sample(self, key: Key, num: int) -> Draws:
        """θ̄ + √½ (σ z + D z′/√(K − 1)), z and z′ standard normal."""
        draws: Draws = _sample_swag(self, jax.random.split(key, num))
        return draws

    def covariances(self, rows: Rows) -> Covariances:
        """JΣJᵀ."""
        along = rows @ self.deviations.T
        diagonal = _multiply(rows * self.variances[None, None], rows)
        return 0.5 * self.scale * (diagonal + _multiply(along, along) / (len(self.deviations) - 1))


@jax.jit
def _sample_swag(swag: Swag, keys: Any) -> Draws:
    """One after the other, so that memory is that of the draws."""
    mean, rows = swag.center, swag.deviations

    def draw(key: Key) -> Vector:
        own, shared = jax.random.split(key)
        z = jax.random.normal(own, mean.shape, mean.dtype) * jnp.sqrt(swag.variances)
        weights = jax.random.normal(shared, rows.shape[:1], mean.dtype)
        both = z + weights @ rows / jnp.sqrt(len(rows) - 1).astype(mean.dtype)
        drawn: Vector = mean + jnp.sqrt(0.5 * jnp.asarray(swag.scale, mean.dtype)) * both
        return drawn

    draws: Draws = jax.lax.map(draw, keys)
    return draws


if TYPE_CHECKING:
    _: tuple[type[Density], ...] = (Gaussian, Normal, Ensemble, Swag)
