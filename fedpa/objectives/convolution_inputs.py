"""What enters a convolution: the k×k patches of its images, shown as `layer_input` shows rows.

As many zeros stand around an image where padding is "SAME" as leave one output for every s pixels,
an odd one at the lower right (Keras's and XLA's rule).
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.objectives.layer_inputs import layer_input, observing

Images = Float[Array, "n h w c"]
Kernel = Float[Array, "k k c d"]
Padding = Literal["VALID", "SAME"]


def convolution_input(
    x: Images,
    kernel: Kernel,
    bias: Float[Array, " d"] | None = None,
    stride: int = 1,
    padding: Padding = "VALID",
) -> Images:
    """`fedpa.layer_input` of a convolution, whose inputs are patches; gives x back."""
    if observing():
        whole = pad_images(x, kernel.shape[0], stride, padding, 0.0)
        layer_input(image_patches(whole, kernel.shape[0], stride), kernel, bias)
    return x


def image_patches(x: Images, k: int, stride: int) -> Float[Array, "n h2 w2 p"]:
    """Every k×k patch as one vector, `stride` pixels apart."""
    return jnp.concatenate(shift_images(x, k, stride), axis=-1)


def shift_images(x: Images, k: int, stride: int) -> list[Array]:
    """The k² shifted images whose pixels are the entries of a patch, row by row."""
    height, width = x.shape[1] - k + 1, x.shape[2] - k + 1
    return [
        x[:, a : a + height : stride, b : b + width : stride] for a in range(k) for b in range(k)
    ]


def pad_images(
    x: Images, k: int, stride: int, padding: Padding, value: float
) -> Float[Array, "n h2 w2 c"]:
    """The image with `value` around it where padding is "SAME"."""
    sides = jax.lax.padtype_to_pads(x.shape[1:3], (k, k), (stride, stride), padding)
    if not any(before or after for before, after in sides):
        return x
    widths = [(0, 0, 0), *((before, after, 0) for before, after in sides), (0, 0, 0)]
    return jax.lax.pad(x, jnp.asarray(value, x.dtype), widths)
