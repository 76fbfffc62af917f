"""Gaussian noise: from the keys of a simulation or from the operating system, fresh or correlated.

Fresh noise w_t ~ N(0, I) is independent from round to round. Correlated noise is DP-FTRL's
(Kairouz et al. 2021; Denisov et al. 2022), for cohorts that can't be sampled: rounds release
Σ_i r_i + zC‖c‖ y_t with

    y = C⁻¹ w,   C lower triangular and Toeplitz, with the b bands c_0 … c_{b−1} of A^{1/2}
    c_k = (2k choose k)/4^k,   A the matrix of prefix sums

the banded square root (Kalinin, Lampert: Banded square root matrix factorization for differentially
private model training, NeurIPS 2024). Later noise cancels a part of earlier noise, so that the sum
over rounds, the model, has less of it. A client that takes part in round t changes Cx in rounds t
to t + b − 1, by ‖c‖C in all. If it is at least b rounds from one of its rounds to the next, its
changes are orthogonal: k rounds are k Gaussian mechanisms of multiplier z, as with fresh noise.

    y_t = w_t − Σ_{j=1}^{b−1} c_j y_{t−j}

so the server keeps the last b − 1 noises. One band is fresh noise.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedpa.types import Key


def draw_normals(key: Key, like: PyTree) -> PyTree:
    """Draw independent N(0, 1) from a key.

    Args:
        key: Another one for every draw.
        like: Arrays, or their shapes and types.
    Returns:
        The numbers, of the structure of `like`.
    Example:
        >>> draw_normals(jax.random.key(0), {"w": jnp.zeros((2, 3))})["w"].shape
        (2, 3)
    """
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, max(len(leaves), 1))
    drawn = [
        jax.random.normal(one, leaf.shape, leaf.dtype)
        for one, leaf in zip(keys, leaves, strict=False)
    ]
    return jax.tree.unflatten(structure, drawn)


def draw_system_normals(like: PyTree) -> PyTree:
    """Draw independent N(0, 1) from the operating system's entropy: no seed, nothing is stored.

    Box and Muller's transformation of 53-bit uniform numbers.

    Args:
        like: Arrays, or their shapes and types.
    Returns:
        The numbers, of the structure of `like`; others at every call.
    Example:
        >>> draw_system_normals({"w": jnp.zeros((2, 3))})["w"].shape
        (2, 3)
    """

    def draw(leaf: Any) -> np.ndarray:
        pairs = -(-math.prod(leaf.shape) // 2)
        radius = np.sqrt(-2 * np.log1p(-draw_system_uniforms(pairs)))
        angle = 2 * np.pi * draw_system_uniforms(pairs)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return both[: math.prod(leaf.shape)].reshape(leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, like)


def draw_system_uniforms(count: int) -> np.ndarray:
    """Draw `count` numbers uniformly in [0, 1) from the operating system's entropy."""
    words = np.frombuffer(os.urandom(8 * count), np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def make_bands(number: int) -> tuple[float, ...]:
    """Compute c_0 … c_{b−1}: c_k = (2k choose k)/4^k.

    Args:
        number: b ≥ 1.
    Returns:
        The bands; 1 alone is fresh noise.
    Example:
        >>> make_bands(3)
        (1.0, 0.5, 0.375)
    """
    return tuple(math.comb(2 * k, k) / 4**k for k in range(number))


def band_norm(bands: tuple[float, ...]) -> float:
    """‖c‖."""
    return math.sqrt(sum(c * c for c in bands))


def correlate(fresh: PyTree, earlier: tuple[PyTree, ...], bands: tuple[float, ...]) -> PyTree:
    """y_t from w_t and the noises of earlier rounds, the latest first."""
    for c, noise in zip(bands[1:], earlier, strict=True):
        fresh = jax.tree.map(lambda w, y, c=c: w - c * y, fresh, noise)
    return fresh


def no_noises(like: PyTree, bands: tuple[float, ...]) -> tuple[PyTree, ...]:
    """What the server keeps before the first round: zeros."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return (zeros,) * (len(bands) - 1)
