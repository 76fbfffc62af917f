"""What the samplers with a temperature share: its meaning, and the checks of rate and temperature.

The posterior at temperature T is p_i(θ) ∝ exp(−(n_i/T) f_i(θ)): f_i at relative temperature T/n_i.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import refuse
from fedpa.precision import widened
from fedpa.types import Count, Params, Scalar

Rate = float | jax.Array
"""A learning rate; an array (traced, too) where it follows a schedule."""


def relative_temperature(temperature: float | None, n: Count) -> Scalar:
    """T/n_i; 1 for T = n_i, which None stands for. An empty client counts as one example."""
    if temperature is None:
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


def check_rate_and_temperature(learning_rate: Rate, temperature: float | None) -> None:
    if not isinstance(learning_rate, jax.Array):
        _check_positive("learning_rate", learning_rate, "must be a finite number > 0")
    if temperature is not None:
        check_temperature(temperature)


def check_temperature(temperature: Any) -> None:
    _check_positive("temperature", temperature, "must be a finite number > 0, or None for n_i")


def _check_positive(field: str, value: Any, expected: str) -> None:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise refuse(field, value, expected)
