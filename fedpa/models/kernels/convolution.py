"""Convolution without padding, stride 1, and the pooling after it.

    y[n, i, j, :] = Σ_{a,b} x[n, i+a, j+b, :] · w[a, b]

XLA's own convolution is the fast one on accelerators and many times slower than a matrix product on
a CPU, above all inside a loop. There the k×k patches of the image become the rows of one matrix,
and all three convolutions of a training step are products with it. An image of one channel is too
thin for that: its convolution is k² multiples of the shifted image, summed in one pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Images = Float[Array, "n h w c"]
Smaller = Float[Array, "n h2 w2 d"]
"""What is left of images: fewer pixels, other channels."""
Kernel = Float[Array, "k k c d"]


@jax.custom_vjp
def convolve(x: Images, kernel: Kernel) -> Smaller:
    """The convolution of images with a kernel; `valid` in the usual vocabulary."""
    return jax.lax.platform_dependent(x, kernel, cpu=by_patches, default=by_xla)


def _forward(x: Images, kernel: Kernel) -> tuple[Smaller, tuple[Images, Kernel]]:
    # Only x is kept: the backward pass makes the same patches, and the compiler makes them once.
    return convolve(x, kernel), (x, kernel)


def _backward(kept: tuple[Images, Kernel], dy: Smaller) -> tuple[Images, Kernel]:
    def transposed(form):  # type: ignore[no-untyped-def]
        return lambda x, kernel, dy: jax.vjp(form, x, kernel)[1](dy)

    return jax.lax.platform_dependent(
        *kept, dy, cpu=transposed(by_patches), default=transposed(by_xla)
    )


convolve.defvjp(_forward, _backward)


def by_xla(x: Images, kernel: Kernel) -> Smaller:
    """XLA's convolution: the plain formulation."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def by_patches(x: Images, kernel: Kernel) -> Smaller:
    """Patches × matrix; for one channel, forwards, a sum of shifted images."""
    if x.shape[-1] == 1:
        return _single_channel(x, kernel)
    return _product(x, kernel)


def _shifted(x: Images, k: int) -> list[Array]:
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    return [x[:, a : a + height, b : b + width] for a in range(k) for b in range(k)]


def _product(x: Images, kernel: Kernel) -> Smaller:
    k, _, _, channels = kernel.shape
    patches = jnp.concatenate(_shifted(x, k), axis=-1)
    rows = patches.reshape(-1, patches.shape[-1])
    return (rows @ kernel.reshape(-1, channels)).reshape(*patches.shape[:-1], channels)


@jax.custom_vjp
def _single_channel(x: Images, kernel: Kernel) -> Smaller:
    k, _, _, channels = kernel.shape
    weights = kernel.reshape(k * k, 1, 1, 1, channels)
    return sum(image * w for image, w in zip(_shifted(x, k), weights, strict=True))


_single_channel.defvjp(
    lambda x, kernel: (_single_channel(x, kernel), (x, kernel)),
    # Backwards, the kernel's gradient is a sum over all pixels: a product again.
    lambda kept, dy: jax.vjp(_product, *kept)[1](dy),
)


def max_pool(x: Images) -> Float[Array, "n h2 w2 c"]:
    """The largest of each 2×2 block; an odd last row or column is left out."""
    n, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    blocks = x.reshape(n, height // 2, 2, width // 2, 2, channels)
    upper = jnp.maximum(blocks[:, :, 0, :, 0], blocks[:, :, 0, :, 1])
    lower = jnp.maximum(blocks[:, :, 1, :, 0], blocks[:, :, 1, :, 1])
    return jnp.maximum(upper, lower)
