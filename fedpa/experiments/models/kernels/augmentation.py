"""CIFAR's pictures as the networks see them: cropped, perhaps mirrored, standardised.

In training each picture is cut to a random 24×24 of its 32×32 pixels (no padding: 9×9 places) and
mirrored half of the time; in evaluation the middle is taken. The crop is then standardised,
(x − mean) / max(std, 1/√N) over its N numbers, on the scale of bytes: what TensorFlow's
`per_image_standardization` does. All of it is part of the compiled step, so that clients hold bytes
and each epoch sees other crops.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from fedpa.types import Key

CROP = 24

Pictures = UInt8[Array, "n h w c"]
Crops = UInt8[Array, "n s s c"]


def seen(pictures: Pictures, key: Key | None, size: int = CROP) -> Float[Array, "n s s c"]:
    """What a network is given of pictures: with a key as in training, without as in evaluation."""
    crops = middle(pictures, size) if key is None else augmented(pictures, key, size)
    return standardised(crops)


def augmented(pictures: Pictures, key: Key, size: int = CROP) -> Crops:
    """A random crop of each picture, mirrored or not; the i-th draws from key i alone."""
    rows, columns = pictures.shape[1] - size + 1, pictures.shape[2] - size + 1

    def one(picture: Array, index: Array) -> Array:
        drawn = jax.random.randint(jax.random.fold_in(key, index), (), 0, 2 * rows * columns)
        place, mirrored = jnp.divmod(drawn, 2)
        row, column = jnp.divmod(place, columns)
        crop = jax.lax.dynamic_slice(
            picture, (row, column, jnp.zeros_like(row)), (size, size, picture.shape[2])
        )
        return jnp.where(mirrored == 1, crop[:, ::-1], crop)

    return jax.vmap(one)(pictures, jnp.arange(pictures.shape[0], dtype=jnp.int32))


def middle(pictures: Pictures, size: int = CROP) -> Crops:
    """The crop at the centre of each picture."""
    row, column = ((extent - size) // 2 for extent in pictures.shape[1:3])
    return pictures[:, row : row + size, column : column + size]


def standardised(crops: Crops) -> Float[Array, "n s s c"]:
    """(x − mean) / max(std, 1/√N) of each picture: 0 where it is all of one colour."""
    x = crops.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=(1, 2, 3), keepdims=True)
    std = jnp.sqrt(jnp.mean(centred**2, axis=(1, 2, 3), keepdims=True))
    return centred / jnp.maximum(std, x[0].size ** -0.5)
