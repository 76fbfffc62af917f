"""The covariance that theory gives the samples of IASG, SGLD and SGHMC on a quadratic.

Hessian A, gradients whose noise has covariance C (of the mini-batch mean, commuting with A,
independent from step to step), learning rate η; λ and c are eigenvalues of A and C, φ = 1 − ηλ.

IASG: plain SGD is an AR(1) process in every eigendirection, and the average of K stationary
iterates has variance

    v/K · [(1 + φ)/(1 − φ) − 2φ(1 − φᴷ) / (K(1 − φ)²)],   v = η²c / (1 − φ²),

which tends to (1/K) A⁻¹CA⁻¹ once K ≫ 1/(ηλ). For a well-specified likelihood C ≈ A/b at batch size
b, so that one-epoch windows (K = n/b) tend to A⁻¹/n, the posterior at T = 1, and fall short of it
when windows are shorter than the mixing time. Reshuffled epochs make the noise within an epoch
cancel, and the spread much smaller still.

SGLD: (2T/n + ηc) / (λ (2 − ηλ)), too wide by 1/(1 − ηλ/2), and by the gradients' noise.

SGHMC with friction α: (2T/n + ηc/α) (2 − α) / (λ (4 − 2α − ηλ)); a small friction amplifies the
gradients' noise.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.samplers.sghmc import FRICTION


def averaged_covariance(
    hessian: Float[Array, "d d"],
    noise: Float[Array, "d d"],
    learning_rate: float,
    per_sample: int,
) -> Float[Array, "d d"]:
    """The covariance that theory gives IASG samples (formula above)."""
    curvature, basis = jnp.linalg.eigh(hessian)
    c = jnp.diagonal(basis.T @ noise @ basis)
    phi = 1 - learning_rate * curvature
    iterate = learning_rate**2 * c / (1 - phi**2)
    k = per_sample
    averaged = iterate / k * ((1 + phi) / (1 - phi) - 2 * phi * (1 - phi**k) / (k * (1 - phi) ** 2))
    return (basis * averaged[None, :]) @ basis.T


def langevin_covariance(
    hessian: Float[Array, "d d"],
    noise: Float[Array, "d d"],
    learning_rate: float,
    relative_temperature: float,
) -> Float[Array, "d d"]:
    """The stationary covariance of SGLD; `relative_temperature` is T/n."""
    curvature, basis = jnp.linalg.eigh(hessian)
    c = jnp.diagonal(basis.T @ noise @ basis)
    variance = (2 * relative_temperature + learning_rate * c) / (
        curvature * (2 - learning_rate * curvature)
    )
    return (basis * variance[None, :]) @ basis.T


def underdamped_covariance(
    hessian: Float[Array, "d d"],
    noise: Float[Array, "d d"],
    learning_rate: float,
    relative_temperature: float,
    friction: float = FRICTION,
) -> Float[Array, "d d"]:
    """The stationary covariance of SGHMC's θ; `relative_temperature` is T/n."""
    curvature, basis = jnp.linalg.eigh(hessian)
    c = jnp.diagonal(basis.T @ noise @ basis)
    variance = (2 * relative_temperature + learning_rate * c / friction) * (2 - friction)
    variance = variance / (curvature * (4 - 2 * friction - learning_rate * curvature))
    return (basis * variance[None, :]) @ basis.T
