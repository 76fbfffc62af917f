"""IASG, iterate-averaged stochastic gradient (Algorithm 4; Mandt et al. 2017).

    burn-in:   θ ← ClientOpt(θ, ∇̂f_i(θ))                           B times
    sample s:  θ ← ClientOpt(θ, ∇̂f_i(θ)), S ← S ∪ {θ}              K times
               θ_s ← average of S

IASG has no temperature: the spread of its samples follows from learning rate, batch size and
window. Around an optimum with Hessian A, with gradients whose noise has covariance C, independent
from step to step, plain SGD with rate η is an AR(1) process in every eigendirection of A. If C
commutes with A, eigenvalues λ and c, φ = 1 − ηλ, the average of K stationary iterates has variance

    v/K · [(1 + φ)/(1 − φ) − 2φ(1 − φᴷ) / (K(1 − φ)²)],   v = η²c / (1 − φ²),

which tends to (1/K) A⁻¹CA⁻¹ once K ≫ 1/(ηλ): `averaged_covariance` computes it. For a well-
specified likelihood C ≈ A/b at batch size b, so that one-epoch windows (K = n/b) tend to A⁻¹/n, the
posterior at T = 1, and fall short of it when windows are shorter than the mixing time. Reshuffled
epochs make the noise within an epoch cancel, and the spread much smaller still.
"""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpa.errors import check_type
from fedpa.objectives.objective import Objective
from fedpa.samplers.minibatch_chain import Epochs, Gradient, Step, Window, minibatch_chain
from fedpa.samplers.sampler import Sampler
from fedpa.samplers.sparse_step import sparse_walk
from fedpa.types import Count, Key, Params, Scalar


def iasg(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    window: Window = Epochs(),
    order: str = "shuffle",
    average: bool = True,
) -> Sampler:
    """Build the sampler.

    optimizer: ClientOpt, any optax transformation.
    window: what makes a sample, and the burn-in before the first.
    order: reshuffled epochs or independent draws with replacement.
    average: False returns the last iterate of each window instead of their average: local SGD as
        FedAvg runs it (Algorithm 2).
    """
    check_type("optimizer", optimizer, optax.GradientTransformation, "optax.sgd(0.1)")

    def client_opt(
        theta: Params, state: optax.OptState, gradient_at: Gradient, n: Count, key: Key
    ) -> tuple[Params, optax.OptState, Scalar]:
        loss, gradient = gradient_at(theta)
        updates, state = optimizer.update(gradient, state, theta)
        return optax.apply_updates(theta, updates), state, loss

    step = Step(lambda theta0, n, key: optimizer.init(theta0), client_opt)
    return minibatch_chain(
        objective,
        step,
        batch_size=batch_size,
        window=window,
        order=order,
        average=average,
        shortcut=lambda theta: sparse_walk(objective, optimizer, average, theta),
    )


def averaged_covariance(
    hessian: Float[Array, "d d"],
    noise: Float[Array, "d d"],
    learning_rate: float,
    per_sample: int,
) -> Float[Array, "d d"]:
    """The covariance that theory gives IASG samples (formula above); `noise` C commutes with A."""
    curvature, basis = jnp.linalg.eigh(hessian)
    c = jnp.diagonal(basis.T @ noise @ basis)
    phi = 1 - learning_rate * curvature
    iterate = learning_rate**2 * c / (1 - phi**2)
    k = per_sample
    averaged = iterate / k * ((1 + phi) / (1 - phi) - 2 * phi * (1 - phi**k) / (k * (1 - phi) ** 2))
    return (basis * averaged[None, :]) @ basis.T
