"""Dropout from eight random bits a unit: a quarter of the randomness of the usual way."""

import jax
import jax.numpy as jnp

from fedpa.errors import refuse
from fedpa.types import Key


def dropout(x: jax.Array, rate: float, key: Key | None) -> jax.Array:
    """Zero each number with probability `rate`, a multiple of 1/256, and scale up the rest.

    Without a key nothing is dropped.
    """
    threshold = round(256 * rate)
    if not 0 <= rate < 1 or threshold != 256 * rate:
        raise refuse("rate", rate, "must be a multiple of 1/256 in [0, 1)")
    if key is None or threshold == 0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= jnp.uint8(threshold)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
