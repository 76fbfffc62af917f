"""The exact Gaussian sampler: independent draws of N(μ_i, (T/n_i) A_i⁺).

For quadratics, least squares and Laplace approximations. T = 1 is the Bayesian posterior; the
default T = n_i, covariance A_i⁻¹, is the scale FedPA needs. Where A_i is singular, draws keep θ₀'s
component in the null space, which is also where SGD started at θ₀ would leave them.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from fedpa.objectives import quadratic
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.quadratic import Quadratic
from fedpa.samplers.sampler import Sampler, Temperature, check_temperature
from fedpa.types import Key, Params, Scalar


class ExactState(NamedTuple):
    theta: Params
    posterior: Quadratic
    center: Float[Array, " d"]
    factor: Float[Array, "d d"]
    """L with L Lᵀ the covariance."""
    key: Key


class ExactInfo(NamedTuple):
    loss: Scalar
    """f(θ_s) − f(μ): the excess of the mean loss over its minimum."""


def exact(posterior: Callable[[ClientData], Quadratic], temperature: Temperature = "n") -> Sampler:
    """Build the exact Gaussian sampler: independent draws of N(μ_i, (T/n_i) A_i⁺).

    Args:
        posterior: A client's data → its quadratic.
        temperature: T > 0, or "n" for n_i (the default), covariance A_i⁻¹.
    Returns:
        The sampler; its info has the excess of the mean loss over its minimum.
    Example:
        >>> sampler = exact(fedpa.objectives.least_squares.posterior, temperature=1.0)
        >>> data = {"x": np.eye(4, 2), "y": np.ones(4)}
        >>> fedpa.samplers.draw(sampler, jnp.zeros(2), data, jax.random.key(0), 3)[0].shape
        (3, 2)
    """
    warmth = check_temperature(temperature)

    def init(theta0: Params, data: ClientData, key: Key) -> ExactState:
        q = posterior(data)
        flat, _ = ravel_pytree(theta0)
        row_space = quadratic.onto_row_space(q, q.mean - flat)
        factor = quadratic.covariance_factor(q, q.n if isinstance(warmth, str) else warmth)
        empty = data.n == 0  # no posterior: the draws are θ₀
        return ExactState(
            theta0,
            posterior=q,
            center=jnp.where(empty, flat, flat + row_space),
            factor=jnp.where(empty, 0, factor).astype(factor.dtype),
            key=key,
        )

    def sample(state: ExactState, data: ClientData) -> tuple[ExactState, Params, ExactInfo]:
        key, draw_key = jax.random.split(state.key)
        _, unravel = ravel_pytree(state.theta)
        noise = jax.random.normal(draw_key, state.center.shape, state.center.dtype)
        theta = state.center + state.factor @ noise
        loss = quadratic.value(state.posterior, theta)
        drawn = unravel(theta)
        return state._replace(theta=drawn, key=key), drawn, ExactInfo(loss)

    return Sampler(init, sample, lambda state: state.theta, warmth)
