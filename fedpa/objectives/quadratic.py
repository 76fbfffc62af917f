"""Quadratic client objectives and the Gaussian posteriors they stand for (section 3).

f(θ) = ½ (θ − μ)ᵀ A (θ − μ) + const over n examples, A the Hessian of the *mean* loss. The posterior
at temperature T is N(μ, (T/n) A⁻¹), and the client delta of eq. 4 is A(θ − μ) = ∇f(θ).

Singular A (fewer examples than dimensions): everything works on the row space of A. The mean is
the minimizer of smallest norm, the covariance uses the pseudo-inverse, and draws keep a given
centre's component in the null space. Give a ridge where a proper posterior is wanted instead.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.types import Key, Scalar

Vector = Float[Array, " d"]
Matrix = Float[Array, "d d"]


class Quadratic(NamedTuple):
    mean: Vector
    """μ: the mode of the posterior."""
    hessian: Matrix
    """A: the Hessian of the mean loss; Σ⁻¹ = (n/T) A."""
    n: Scalar
    """The number of examples; a sum of several for a global posterior."""


def value(q: Quadratic, theta: Vector) -> Scalar:
    """f(θ) − f(μ) = ½ (θ − μ)ᵀ A (θ − μ)."""
    return 0.5 * (theta - q.mean) @ q.hessian @ (theta - q.mean)


def delta(q: Quadratic, theta: Vector) -> Vector:
    """Δ = A (θ − μ), eq. 4's term at temperature n: the exact client delta."""
    return q.hessian @ (theta - q.mean)


def precision(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """Σ⁻¹ = (n/T) A."""
    return (q.n / temperature) * q.hessian


def covariance(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """Σ = (T/n) A⁺."""
    factor = covariance_factor(q, temperature)
    return factor @ factor.T


def covariance_factor(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """L with L Lᵀ = (T/n) A⁺: columns of the null space are zero."""
    eigenvalues, vectors, in_row_space = _spectrum(q.hessian)
    scale = jnp.sqrt(temperature / (q.n * jnp.where(in_row_space, eigenvalues, 1)))
    return vectors * jnp.where(in_row_space, scale, 0)[None, :]


def draw(
    q: Quadratic, key: Key, num: int, temperature: float | Scalar = 1.0
) -> Float[Array, "l d"]:
    """`num` independent draws of N(μ, (T/n) A⁺)."""
    factor = covariance_factor(q, temperature)
    noise = jax.random.normal(key, (num, q.mean.shape[0]), q.mean.dtype)
    return q.mean[None, :] + noise @ factor.T


def onto_row_space(q: Quadratic, theta: Vector) -> Vector:
    """The projection of θ onto the row space of A; the rest the data say nothing about."""
    _, vectors, in_row_space = _spectrum(q.hessian)
    return vectors @ jnp.where(in_row_space, vectors.T @ theta, 0)


def minimizer(hessian: Matrix, linear: Vector) -> Vector:
    """A⁺ b: the minimizer of ½ θᵀAθ − bᵀθ (Prop. 2), of smallest norm where A is singular."""
    eigenvalues, vectors, in_row_space = _spectrum(hessian)
    coefficients = (vectors.T @ linear) / jnp.where(in_row_space, eigenvalues, 1)
    return vectors @ jnp.where(in_row_space, coefficients, 0)


def _spectrum(hessian: Matrix) -> tuple[Vector, Matrix, Array]:
    eigenvalues, vectors = jnp.linalg.eigh(hessian)
    tolerance = jnp.finfo(hessian.dtype).eps * hessian.shape[0] * jnp.max(jnp.abs(eigenvalues))
    return eigenvalues, vectors, eigenvalues > tolerance
