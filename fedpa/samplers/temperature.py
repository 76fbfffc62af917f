"""What the samplers with a temperature share: its meaning, and the checks of rate and temperature.

The posterior at temperature T is p_i(θ) ∝ exp(−(n_i/T) f_i(θ)): f_i at relative temperature T/n_i.
T = 1 is the Bayesian posterior, T = n_i ("n") has the covariance A_i⁻¹ at which Σ̂⁻¹(θ − μ̂) is the
gradient. FedPA multiplies deviations by √(n_i/T) and so gets that covariance at every T; what T
decides is the noise of μ̂, √(T tr A_i⁻¹/(n_i ℓ)). With few samples of many parameters it drowns the
delta unless T is small: on the digits (ℓ = 5, d = 2,410) at T = 1 as well as at T = n_i.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import refuse
from fedpa.precision import widened
from fedpa.types import Count, Params, Scalar

Temperature = float | str
"""T, or "n" for n_i."""
COLD = 0.01
"""T of the command's samplers in FedPA, if not given."""
Rate = float | jax.Array
"""A learning rate; an array (traced, too) where it follows a schedule."""


def relative_temperature(temperature: Temperature, n: Count) -> Scalar:
    """T/n_i. An empty client counts as one example."""
    if temperature == "n":
        return jnp.ones((), jnp.float32)
    return jnp.asarray(temperature, jnp.float32) / jnp.maximum(n, 1).astype(jnp.float32)


def descent(gradient: Params) -> Params:
    """−∇f, wide enough to add up."""
    return jax.tree.map(jnp.negative, widened(gradient))


def in_dtype_of(tree: Params, value: Any) -> jax.Array:
    """A number in the dtype that the tree's arrays have together."""
    return jnp.asarray(value).astype(
        np.result_type(*[leaf.dtype for leaf in jax.tree.leaves(tree)])
    )


def check_rate(learning_rate: Rate) -> None:
    if not isinstance(learning_rate, jax.Array):
        _check_positive("learning_rate", learning_rate, "must be a finite number > 0")


def checked_temperature(temperature: Any) -> Temperature:
    """T, if it is one; there is no default that suits both FedPA and a posterior by itself."""
    if temperature is None:
        raise refuse(
            "temperature",
            None,
            f"must be given: {COLD} for FedPA with few samples of many parameters, 1 for the "
            "Bayesian posterior, 'n' for covariance A⁻¹",
        )
    if temperature != "n":
        _check_positive("temperature", temperature, "must be a finite number > 0, or 'n' for n_i")
    return temperature


def _check_positive(field: str, value: Any, expected: str) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise refuse(field, value, expected)
