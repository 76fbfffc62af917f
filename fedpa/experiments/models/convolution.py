"""Convolution, and the pooling after it.

    y[n, i, j, :] = Σ_{a,b} x[n, s i+a, s j+b, :] · w[a, b]

with stride s, and with zeros around the image where padding is "SAME": as many as leave one output
for every s pixels, an odd one at the lower right (Keras's and XLA's rule).

XLA's own convolution is the fast one on accelerators and many times slower than a matrix product on
a CPU, above all inside a loop. There the k×k patches of the image become the rows of one matrix,
and all three convolutions of a training step are products with it. An image of one channel is too
thin for that: its convolution is k² multiples of the shifted image, summed in one pass.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.objectives.layer_inputs import (
    Images,
    Kernel,
    Padding,
    image_patches,
    pad_images,
    shift_images,
)

Smaller = Float[Array, "n h2 w2 d"]
"""What is left of images: fewer pixels, other channels."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve(x: Images, kernel: Kernel, stride: int = 1, padding: Padding = "VALID") -> Smaller:
    """The convolution of images with a kernel."""
    y: Smaller = jax.lax.platform_dependent(
        x,
        kernel,
        cpu=functools.partial(by_patches, stride=stride, padding=padding),
        default=functools.partial(by_xla, stride=stride, padding=padding),
    )
    return y


def _forward(
    x: Images, kernel: Kernel, stride: int, padding: Padding
) -> tuple[Smaller, tuple[Images, Kernel]]:
    # Only x is kept: the backward pass makes the same patches, and the compiler makes them once.
    return convolve(x, kernel, stride, padding), (x, kernel)


def _backward(
    stride: int, padding: Padding, kept: tuple[Images, Kernel], dy: Smaller
) -> tuple[Images, Kernel]:
    def transpose_form(form: Callable[..., Smaller]) -> Callable[..., tuple[Images, Kernel]]:
        form = functools.partial(form, stride=stride, padding=padding)
        return lambda x, kernel, dy: jax.vjp(form, x, kernel)[1](dy)

    dx, dkernel = jax.lax.platform_dependent(
        *kept, dy, cpu=transpose_form(by_patches), default=transpose_form(by_xla)
    )
    return dx, dkernel


convolve.defvjp(_forward, _backward)


def by_xla(x: Images, kernel: Kernel, stride: int = 1, padding: Padding = "VALID") -> Smaller:
    """XLA's convolution: the plain formulation."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def by_patches(x: Images, kernel: Kernel, stride: int = 1, padding: Padding = "VALID") -> Smaller:
    """Patches × matrix; for one channel, forwards, a sum of shifted images."""
    x = pad_images(x, kernel.shape[0], stride, padding, 0.0)
    if x.shape[-1] == 1:
        return _single_channel(x, kernel, stride)
    return _product(x, kernel, stride)


def _product(x: Images, kernel: Kernel, stride: int) -> Smaller:
    k, _, _, channels = kernel.shape
    patches = image_patches(x, k, stride)
    rows = patches.reshape(-1, patches.shape[-1])
    return (rows @ kernel.reshape(-1, channels)).reshape(*patches.shape[:-1], channels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _single_channel(x: Images, kernel: Kernel, stride: int) -> Smaller:
    k, _, _, channels = kernel.shape
    weights = kernel.reshape(k * k, 1, 1, 1, channels)
    y: Smaller
    y = sum(image * w for image, w in zip(shift_images(x, k, stride), weights, strict=True))
    return y


_single_channel.defvjp(
    lambda x, kernel, stride: (_single_channel(x, kernel, stride), (x, kernel)),
    # Backwards, the kernel's gradient is a sum over all pixels: a product again.
    lambda stride, kept, dy: jax.vjp(lambda x, w: _product(x, w, stride), *kept)[1](dy),
)


def max_pool(x: Images) -> Float[Array, "n h2 w2 c"]:
    """The largest of each 2×2 block; an odd last row or column is left out."""
    n, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    blocks = x.reshape(n, height // 2, 2, width // 2, 2, channels)
    upper = jnp.maximum(blocks[:, :, 0, :, 0], blocks[:, :, 0, :, 1])
    lower = jnp.maximum(blocks[:, :, 1, :, 0], blocks[:, :, 1, :, 1])
    return jnp.maximum(upper, lower)


def overlapping_max_pool(x: Images, k: int = 3, stride: int = 2) -> Float[Array, "n h2 w2 c"]:
    """The largest of each k×k window, one every `stride` pixels, "SAME" padding left out of it."""
    x = pad_images(x, k, stride, "SAME", -jnp.inf)
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    # First down, then across: 2 (k − 1) maxima in place of k² − 1.
    rows = functools.reduce(jnp.maximum, [x[:, a : a + height : stride] for a in range(k)])
    return functools.reduce(jnp.maximum, [rows[:, :, b : b + width : stride] for b in range(k)])
