"""Quadratic client objectives and the Gaussian posteriors they stand for (section 3).

f(θ) = ½ (θ − μ)ᵀ A (θ − μ) + const over n examples, A the Hessian of the *mean* loss. The posterior
at temperature T is N(μ, (T/n) A⁻¹), and the client delta of eq. 4 is A(θ − μ) = ∇f(θ).

Singular A (fewer examples than dimensions): everything works on the row space of A. The mean is
the minimizer of smallest norm, the covariance uses the pseudo-inverse, and draws keep a given
centre's component in the null space. Give a ridge where a proper posterior is wanted instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from fedpa.errors import FedpaError, check_type, refuse
from fedpa.lapack import one_by_one
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from fedpa.types import Key, Params, Scalar

Vector = Float[Array, " d"]
"""θ as one vector."""
Matrix = Float[Array, "d d"]
"""A symmetric matrix over θ's coordinates."""


class Quadratic(NamedTuple):
    """f(θ) = ½ (θ − μ)ᵀ A (θ − μ) + const over n examples, a posterior N(μ, (T/n) A⁻¹) (section 3).

    Args:
        mean: μ: the mode of the posterior.
        hessian: A: the Hessian of the mean loss; Σ⁻¹ = (n/T) A.
        n: The number of examples; a sum of several for a global posterior.
    Example:
        >>> q = fedpa.objectives.Quadratic(jnp.ones(2), jnp.eye(2), jnp.float32(10))
        >>> print(fedpa.objectives.quadratic.delta(q, jnp.zeros(2)))
        [-1. -1.]
    """

    mean: Vector
    hessian: Matrix
    n: Scalar


def value(q: Quadratic, theta: Vector) -> Scalar:
    """Compute f(θ) − f(μ) = ½ (θ − μ)ᵀ A (θ − μ).

    Args:
        q: The quadratic.
        theta: θ.
    Returns:
        A number ≥ 0.
    Example:
        >>> value(Quadratic(jnp.ones(2), jnp.eye(2), jnp.float32(10)), jnp.zeros(2)).item()
        1.0
    """
    return 0.5 * (theta - q.mean) @ q.hessian @ (theta - q.mean)


def delta(q: Quadratic, theta: Vector) -> Vector:
    """Compute the exact client delta Δ = A (θ − μ) = ∇f(θ): eq. 4's term at temperature n.

    Args:
        q: The quadratic.
        theta: θ.
    Returns:
        Δ.
    Example:
        >>> print(delta(Quadratic(jnp.ones(2), 2 * jnp.eye(2), jnp.float32(10)), jnp.zeros(2)))
        [-2. -2.]
    """
    return q.hessian @ (theta - q.mean)


def precision(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """Compute the posterior's precision Σ⁻¹ = (n/T) A.

    Args:
        q: The quadratic.
        temperature: T > 0; default: 1.
    Returns:
        Σ⁻¹.
    Example:
        >>> print(precision(Quadratic(jnp.ones(2), jnp.eye(2), jnp.float32(10))))
        [[10.  0.]
         [ 0. 10.]]
    """
    return (q.n / temperature) * q.hessian


def covariance(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """Compute the posterior's covariance Σ = (T/n) A⁺.

    Args:
        q: The quadratic.
        temperature: T > 0; default: 1.
    Returns:
        Σ; 0 in the null space of A.
    Example:
        >>> print(covariance(Quadratic(jnp.ones(2), jnp.eye(2), jnp.float32(10))).round(3))
        [[0.1 0. ]
         [0.  0.1]]
    """
    factor = covariance_factor(q, temperature)
    return factor @ factor.T


def covariance_factor(q: Quadratic, temperature: float | Scalar = 1.0) -> Matrix:
    """Compute L with L Lᵀ = (T/n) A⁺, from A's eigenvectors.

    Args:
        q: The quadratic.
        temperature: T > 0; default: 1.
    Returns:
        L; columns of the null space are zero.
    Example:
        >>> q = Quadratic(jnp.zeros(2), jnp.diag(jnp.array([4.0, 0.0])), jnp.float32(1))
        >>> print(jnp.abs(covariance_factor(q)).sum(0))
        [0.  0.5]
    """
    eigenvalues, vectors, in_row_space = _spectrum(q.hessian)
    scale = jnp.sqrt(temperature / (q.n * jnp.where(in_row_space, eigenvalues, 1)))
    return vectors * jnp.where(in_row_space, scale, 0)[None, :]


def draw(
    q: Quadratic, key: Key, num: int, temperature: float | Scalar = 1.0
) -> Float[Array, "l d"]:
    """Draw independent samples of N(μ, (T/n) A⁺).

    Args:
        q: The quadratic.
        key: The draws' randomness.
        num: How many, ℓ.
        temperature: T > 0; default: 1.
    Returns:
        Shape (ℓ, d).
    Example:
        >>> q = Quadratic(jnp.zeros(2), jnp.eye(2), jnp.float32(10))
        >>> draw(q, jax.random.key(0), 3).shape
        (3, 2)
    """
    factor = covariance_factor(q, temperature)
    noise = jax.random.normal(key, (num, q.mean.shape[0]), q.mean.dtype)
    return q.mean[None, :] + noise @ factor.T


def onto_row_space(q: Quadratic, theta: Vector) -> Vector:
    """Project θ onto the row space of A; the data say nothing about the rest.

    Args:
        q: The quadratic.
        theta: θ.
    Returns:
        The projection.
    Example:
        >>> q = Quadratic(jnp.zeros(2), jnp.diag(jnp.array([4.0, 0.0])), jnp.float32(1))
        >>> print(onto_row_space(q, jnp.ones(2)))
        [1. 0.]
    """
    _, vectors, in_row_space = _spectrum(q.hessian)
    return vectors @ jnp.where(in_row_space, vectors.T @ theta, 0)


def minimizer(hessian: Matrix, linear: Vector) -> Vector:
    """Compute A⁺b, the minimizer of ½ θᵀAθ − bᵀθ (Prop. 2).

    Args:
        hessian: A, symmetric, positive semidefinite.
        linear: b.
    Returns:
        The minimizer, of smallest norm where A is singular.
    Example:
        >>> print(minimizer(2 * jnp.eye(2), jnp.ones(2)))
        [0.5 0.5]
    """
    eigenvalues, vectors, in_row_space = _spectrum(hessian)
    coefficients = (vectors.T @ linear) / jnp.where(in_row_space, eigenvalues, 1)
    return vectors @ jnp.where(in_row_space, coefficients, 0)


def global_posterior(
    clients: Sequence[Quadratic], weights: Sequence[float] | np.ndarray | jax.Array | None = None
) -> Quadratic:
    """Multiply the clients' posteriors (Prop. 1) and find the product's mode (eq. 3, Prop. 2).

    A = Σ q_i A_i / Σ q_i and μ = A⁻¹ Σ q_i A_i μ_i / Σ q_i: each n_i counts once. At temperature 1
    the precision n A = Σ n_i A_i is the product's.

    Args:
        clients: A sequence of `Quadratic`, one per client, all of one dimension.
        weights: q_i ≥ 0, one per client; default: n_i.
    Returns:
        The `Quadratic` whose mean is the mode of the global posterior.
    Raises:
        FedpaError: For other clients, or weights that don't fit them.
    Example:
        >>> one = Quadratic(jnp.zeros(1), jnp.eye(1), jnp.float32(10))
        >>> two = Quadratic(jnp.ones(1), 3 * jnp.eye(1), jnp.float32(10))
        >>> round(global_posterior([one, two]).mean.item(), 3)
        0.75
    """
    _check_clients(clients)
    sizes = jnp.stack([jnp.asarray(client.n) for client in clients])
    q = sizes if weights is None else _check_weights(weights, len(clients)).astype(sizes.dtype)
    hessians = jnp.stack([client.hessian for client in clients])
    pulls = jnp.stack([client.hessian @ client.mean for client in clients])
    hessian = jnp.einsum("i,ijk->jk", q, hessians) / jnp.sum(q)
    linear = jnp.einsum("i,ij->j", q, pulls) / jnp.sum(q)
    return Quadratic(minimizer(hessian, linear), hessian, jnp.sum(sizes))


def _check_clients(clients: Any) -> None:
    example = "fedpa.objectives.least_squares.posterior(data)"
    if isinstance(clients, Quadratic) or not isinstance(clients, Sequence) or not clients:
        raise refuse("clients", clients, f"must be a list of Quadratic, each as of {example}")
    for index, client in enumerate(clients):
        check_type(f"clients[{index}]", client, Quadratic, example)
        dim = np.shape(clients[0].mean)
        shapes = np.shape(client.mean), np.shape(client.hessian), np.shape(client.n)
        if len(dim) != 1 or shapes != (dim, dim * 2, ()):
            raise FedpaError(
                f"clients[{index}] has mean, hessian and n of shapes {shapes}: must be "
                "((d,), (d, d), ()), with one d for all clients"
            )


def _check_weights(weights: Any, count: int) -> jax.Array:
    expected = f"must be {count} numbers ≥ 0, one per client, not all 0"
    try:
        q = jnp.asarray(weights)
    except (TypeError, ValueError):
        raise refuse("weights", weights, expected) from None
    if q.shape != (count,) or not (jnp.issubdtype(q.dtype, jnp.number)):
        raise refuse("weights", weights, expected)
    if not isinstance(q, jax.core.Tracer):
        values = np.asarray(q, np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise refuse("weights", weights, expected)
    return q


def laplace(objective: Objective, data: ClientData, mode: Params, key: Key) -> Quadratic:
    """Approximate a posterior by N(θ*, (T/n) H⁻¹), H the Hessian of the mean loss at a mode θ*.

    Takes O(d²) memory: for small models only.

    Args:
        objective: The loss.
        data: From `client_data`.
        mode: θ*, a minimum of the client's loss.
        key: For a loss that is random.
    Returns:
        The quadratic, over the parameters ravelled in tree order.
    Example:
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.ones(2)})
        >>> objective = Objective(fedpa.objectives.least_squares.loss)
        >>> print(laplace(objective, data, jnp.ones(2), jax.random.key(0)).hessian)
        [[0.5 0. ]
         [0.  0.5]]
    """
    flat, unravel = ravel_pytree(mode)

    def flat_loss(vector: jax.Array) -> jax.Array:
        return client_loss(objective, unravel(vector), data, key)

    hessian = jax.hessian(flat_loss)(flat)
    return Quadratic(flat, 0.5 * (hessian + hessian.T), data.n.astype(flat.dtype))


@one_by_one
def _spectrum(hessian: Matrix) -> tuple[Vector, Matrix, Array]:
    """Eigenvalues, eigenvectors, and which of them span the row space."""
    eigenvalues, vectors = jnp.linalg.eigh(hessian)
    tolerance = jnp.finfo(hessian.dtype).eps * hessian.shape[0] * jnp.max(jnp.abs(eigenvalues))
    return eigenvalues, vectors, eigenvalues > tolerance
