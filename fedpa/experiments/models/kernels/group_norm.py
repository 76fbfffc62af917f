"""Group normalization (Wu and He, 2018).

    y = γ (x − μ) / √(σ² + ε) + β

with μ and σ² over all pixels of a group of consecutive channels of one image, σ² from the
deviations (the difference of two large moments would lose its digits). Pixels are summed channel by
channel and a group's channels then: sums along an image's memory, several times faster than over
groups cut out of it. The backward pass is written out: it reads x and ∂y once for both of its sums,
which are the gradients of γ and β as well. Reverse mode only.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import refuse
from fedpa.experiments.models.kernels.convolution import Images
from fedpa.precision import accumulation_dtype, widened

EPSILON = 1e-3

PerImage = Float[Array, "n 1 1 c"]
PerChannel = Float[Array, " c"]
Kept = tuple[Images, PerChannel, PerImage, PerImage]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def group_norm(x: Images, scale: PerChannel, offset: PerChannel, groups: int) -> Images:
    """Images with every group of channels at mean 0 and variance 1, then scaled and offset."""
    return _forward(x, scale, offset, groups)[0]


def _forward(x: Images, scale: PerChannel, offset: PerChannel, groups: int) -> tuple[Images, Kept]:
    wide = widened(x)
    mean = _group_means(_pixel_sums(wide), wide, groups)
    variance = _group_means(_pixel_sums((wide - mean) ** 2), wide, groups)
    inverse = jax.lax.rsqrt(variance + EPSILON)
    y = (wide - mean) * (inverse * _row(scale)) + _row(offset)
    return y.astype(x.dtype), (x, scale, mean, inverse)


def _backward(groups: int, kept: Kept, dy: Images) -> tuple[Images, PerChannel, PerChannel]:
    x, scale, mean, inverse = kept
    dy, normal = widened(dy), (widened(x) - mean) * inverse
    along_offset, along_scale = _pixel_sums(dy), _pixel_sums(dy * normal)
    # Moving all of a group, or stretching it, changes nothing: those parts of the gradient go.
    shift, stretch = (
        _group_means(total * _row(scale), x, groups) for total in (along_offset, along_scale)
    )
    dx = inverse * (dy * _row(scale) - shift - normal * stretch)
    d_scale, d_offset = (jnp.sum(a, axis=(0, 1, 2)) for a in (along_scale, along_offset))
    return dx.astype(x.dtype), d_scale.astype(scale.dtype), d_offset.astype(scale.dtype)


group_norm.defvjp(_forward, _backward)


def _pixel_sums(x: Images) -> PerImage:
    return jnp.sum(x, axis=(1, 2), keepdims=True)


def _group_means(sums: PerImage, x: Images, groups: int) -> PerImage:
    """Each channel's group's mean, from the channels' sums over pixels."""
    n, height, width, channels = x.shape
    if not 0 < groups <= channels or channels % groups:
        raise refuse("groups", groups, f"must divide the number of channels, {channels}")
    size = channels // groups
    total = jnp.sum(sums.reshape(n, groups, size), axis=2, keepdims=True)
    means = total / (height * width * size)
    return jnp.broadcast_to(means, (n, groups, size)).reshape(n, 1, 1, channels)


def _row(vector: PerChannel) -> Float[Array, "1 1 1 c"]:
    return vector.astype(accumulation_dtype(vector.dtype)).reshape(1, 1, 1, -1)
