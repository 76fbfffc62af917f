"""CIFAR-100's residual networks with group normalization (appendix D).

A block in pre-activation order (He et al., 2016, "identity mappings") is

    norm, ReLU, conv 3×3, norm, ReLU, conv 3×3; plus the input

Convolutions have no bias. Where a block changes the number of channels or pixels its input is
projected, by a 1×1 convolution and a norm. Kernels begin as He's normal, norms as the identity.

`resnet18` is the network of Reddi et al., used by the paper: conv 7×7×64 at stride 2, norm, ReLU,
max-pool 3×3 at stride 2; four stages of two blocks, 64, 128, 256 and 512 wide, all at stride 1 (the
original hands no stride on: from a 24×24 crop on all of them work on 6×6 pixels); norm, ReLU, mean
over pixels, dense 100. The number of groups was a default of the library the original used, 2 at
first and 32 later.

`small_resnet` has the same parts and input and trains on two CPU cores; it is not one of the
paper's: conv 3×3×24 at stride 2, norm, ReLU; three blocks, 24, 48 and 96 wide, on 12×12, 6×6 and
3×3 pixels of a 24×24 crop; norm, ReLU, mean over pixels, dense 100.

In both the first block has no pre-norm: its input has just been through one. A batch is
{"x": bytes (b, 32, 32, 3), "y": (b,)}.
"""

import functools
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from fedpa.errors import refuse
from fedpa.experiments.models.convolution import Smaller, convolve, overlapping_max_pool
from fedpa.metrics.classification import cross_entropy
from fedpa.objectives.layer_inputs import (
    Images,
    Kernel,
    convolution_input,
    layer_input,
    layer_output,
)
from fedpa.precision import accumulation_dtype, widen
from fedpa.types import Examples, Key, Losses, Scalar

CROP = 24
EPSILON = 1e-3
DECAY = 1e-4

Pictures = UInt8[Array, "n h w c"]
Crops = UInt8[Array, "n s s c"]
PerImage = Float[Array, "n 1 1 c"]
PerChannel = Float[Array, " c"]
Kept = tuple[Images, PerChannel, PerImage, PerImage]


class GroupNorm(eqx.Module):
    scale: PerChannel
    offset: PerChannel
    groups: int = eqx.field(static=True)

    def __init__(self, channels: int, groups: int) -> None:
        """Refuses a number of groups that does not divide the channels, as the original does."""
        if groups < 1 or channels % groups:
            raise refuse("groups", groups, f"must divide the number of channels, {channels}")
        self.scale, self.offset, self.groups = jnp.ones(channels), jnp.zeros(channels), groups

    def __call__(self, x: Images) -> Images:
        return group_norm(x, self.scale, self.offset, self.groups)


class Projection(eqx.Module):
    kernel: Kernel
    norm: GroupNorm


class Block(eqx.Module):
    first_norm: GroupNorm | None
    first_kernel: Kernel
    second_norm: GroupNorm
    second_kernel: Kernel
    projection: Projection | None
    stride: int = eqx.field(static=True)

    def __init__(
        self, channels: int, width: int, groups: int, stride: int, pre_norm: bool, *, key: Key
    ) -> None:
        """From `channels` to `width` channels, every `stride`-th pixel.

        Without `pre_norm` the first norm and ReLU are left out.
        """
        keys = jax.random.split(key, 3)
        self.first_norm = GroupNorm(channels, groups) if pre_norm else None
        self.first_kernel = he_normal(keys[0], 3, channels, width)
        self.second_norm = GroupNorm(width, groups)
        self.second_kernel = he_normal(keys[1], 3, width, width)
        self.projection = None
        if channels != width or stride != 1:
            kernel = he_normal(keys[2], 1, channels, width)
            self.projection = Projection(kernel, GroupNorm(width, groups))
        self.stride = stride

    def __call__(self, x: Images) -> Smaller:
        h = x if self.first_norm is None else jax.nn.relu(self.first_norm(x))
        h = convolution(h, self.first_kernel, self.stride)
        h = convolution(jax.nn.relu(self.second_norm(h)), self.second_kernel)
        if self.projection is None:
            return x + h
        shortcut = convolution(x, self.projection.kernel, self.stride)
        return self.projection.norm(shortcut) + h


class ResNet(eqx.Module):
    stem: Kernel
    stem_norm: GroupNorm
    blocks: tuple[Block, ...]
    final_norm: GroupNorm
    weight: Float[Array, "f classes"]
    bias: Float[Array, " classes"]
    pool: bool = eqx.field(static=True)

    def __init__(
        self,
        stem: int,
        widths: Sequence[int],
        strides: Sequence[int],
        groups: int,
        classes: int,
        *,
        pool: bool,
        key: Key,
    ) -> None:
        """A stem of `stem` × `stem` pixels, max-pooled or not; a block for each width and stride.

        `groups` must divide the first width.
        """
        stem_key, dense_key, *keys = jax.random.split(key, 2 + len(widths))
        self.stem = he_normal(stem_key, stem, 3, widths[0])
        self.stem_norm = GroupNorm(widths[0], groups)
        inputs = [widths[0], *widths[:-1]]
        self.blocks = tuple(
            Block(inputs[i], widths[i], groups, strides[i], pre_norm=i > 0, key=keys[i])
            for i in range(len(widths))
        )
        self.final_norm = GroupNorm(widths[-1], groups)
        self.weight = 0.01 * jax.random.normal(dense_key, (widths[-1], classes))
        self.bias = jnp.zeros(classes)
        self.pool = pool

    def __call__(self, x: Pictures, key: Key | None = None) -> Float[Array, "n classes"]:
        """Logits of pictures; with a key, of random crops of them as in training."""
        h = prepare_pictures(x, key).astype(self.stem.dtype)
        h = self.stem_norm(convolution(h, self.stem, 2))
        # ReLU commutes with a maximum: after the pool there is a quarter to do.
        h = jax.nn.relu(overlapping_max_pool(h) if self.pool else h)
        for block in self.blocks:
            h = block(h)
        h = jnp.mean(jax.nn.relu(self.final_norm(h)), axis=(1, 2))
        h = layer_input(h, self.weight, self.bias)
        return layer_output(h @ self.weight, self.weight) + self.bias[None]


def resnet18(classes: int = 100, width: int = 64, groups: int = 32, *, key: Key) -> ResNet:
    """Draw the paper's network; `width` is that of the first stage."""
    widths = [width * 2**stage for stage in range(4) for _ in range(2)]
    return ResNet(7, widths, [1] * 8, groups, classes, pool=True, key=key)


def small_resnet(classes: int = 100, width: int = 24, groups: int = 8, *, key: Key) -> ResNet:
    """Draw the network for two CPU cores; `width` is that of the first block."""
    widths = [width, 2 * width, 4 * width]
    return ResNet(3, widths, [1, 2, 2], groups, classes, pool=False, key=key)


def loss(params: ResNet, batch: Examples, key: Key | None) -> Losses:
    """Cross-entropy of each example; of the middle of its picture without a key."""
    return cross_entropy(params(batch["x"], key), batch["y"])


def regularizer(params: ResNet) -> Scalar:
    """1e-4 Σ w², Keras's `l2` (no half), over the kernels and the last layer with its bias."""
    squares = [jnp.sum(widen(w) ** 2) for w in jax.tree.leaves(params) if w.ndim > 1]
    return DECAY * jnp.sum(jnp.stack(squares)) + DECAY * jnp.sum(widen(params.bias) ** 2)


def convolution(x: Images, kernel: Kernel, stride: int = 1) -> Smaller:
    """A layer of these networks: zeros around the image, no bias."""
    x = convolution_input(x, kernel, None, stride, "SAME")
    return layer_output(convolve(x, kernel, stride, "SAME"), kernel)


def he_normal(key: Key, k: int, channels: int, width: int) -> Kernel:
    return jax.nn.initializers.he_normal()(key, (k, k, channels, width))


def prepare_pictures(
    pictures: Pictures, key: Key | None, size: int = CROP
) -> Float[Array, "n s s c"]:
    """Crop and standardize pictures: with a key as in training, without as in evaluation.

    In training each picture is cut to a random 24×24 of its 32×32 pixels (no padding: 9×9 places)
    and mirrored half of the time; in evaluation the middle is taken. All of it is part of the
    compiled step, so that clients hold bytes and each epoch sees other crops.
    """
    crops = crop_middle(pictures, size) if key is None else crop_randomly(pictures, key, size)
    return standardize(crops)


def crop_randomly(pictures: Pictures, key: Key, size: int = CROP) -> Crops:
    """A random crop of each picture, mirrored or not; the i-th draws from key i alone."""
    rows, columns = pictures.shape[1] - size + 1, pictures.shape[2] - size + 1

    def crop(picture: Array, index: Array) -> Array:
        drawn = jax.random.randint(jax.random.fold_in(key, index), (), 0, 2 * rows * columns)
        place, mirrored = jnp.divmod(drawn, 2)
        row, column = jnp.divmod(place, columns)
        part = jax.lax.dynamic_slice(
            picture, (row, column, jnp.zeros_like(row)), (size, size, picture.shape[2])
        )
        return jnp.where(mirrored == 1, part[:, ::-1], part)

    return jax.vmap(crop)(pictures, jnp.arange(pictures.shape[0], dtype=jnp.int32))


def crop_middle(pictures: Pictures, size: int = CROP) -> Crops:
    """The crop at the centre of each picture."""
    row, column = ((extent - size) // 2 for extent in pictures.shape[1:3])
    return pictures[:, row : row + size, column : column + size]


def standardize(crops: Crops) -> Float[Array, "n s s c"]:
    """(x − mean) / max(std, 1/√N) over the N numbers of each picture, on the scale of bytes.

    TensorFlow's `per_image_standardization`; 0 where a picture is all of one colour.
    """
    x = crops.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=(1, 2, 3), keepdims=True)
    std = jnp.sqrt(jnp.mean(centred**2, axis=(1, 2, 3), keepdims=True))
    return centred / jnp.maximum(std, x[0].size ** -0.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def group_norm(x: Images, scale: PerChannel, offset: PerChannel, groups: int) -> Images:
    """Normalize every group of channels to mean 0 and variance 1 (Wu and He, 2018).

        y = γ (x − μ) / √(σ² + ε) + β

    with μ and σ² over all pixels of a group of consecutive channels of one image, σ² from the
    deviations (the difference of two large moments would lose its digits). Pixels are summed
    channel by channel and a group's channels then: sums along an image's memory, several times
    faster than over groups cut out of it. The backward pass is written out: it reads x and ∂y once
    for both of its sums, which are the gradients of γ and β as well. Reverse mode only.
    """
    return _forward(x, scale, offset, groups)[0]


def _forward(x: Images, scale: PerChannel, offset: PerChannel, groups: int) -> tuple[Images, Kept]:
    wide = widen(x)
    mean = _group_means(_pixel_sums(wide), wide, groups)
    variance = _group_means(_pixel_sums((wide - mean) ** 2), wide, groups)
    inverse = jax.lax.rsqrt(variance + EPSILON)
    y = (wide - mean) * (inverse * _row(scale)) + _row(offset)
    return y.astype(x.dtype), (x, scale, mean, inverse)


def _backward(groups: int, kept: Kept, dy: Images) -> tuple[Images, PerChannel, PerChannel]:
    x, scale, mean, inverse = kept
    dy, normal = widen(dy), (widen(x) - mean) * inverse
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
    size = channels // groups
    total = jnp.sum(sums.reshape(n, groups, size), axis=2, keepdims=True)
    means = total / (height * width * size)
    return jnp.broadcast_to(means, (n, groups, size)).reshape(n, 1, 1, channels)


def _row(vector: PerChannel) -> Float[Array, "1 1 1 c"]:
    return vector.astype(accumulation_dtype(vector.dtype)).reshape(1, 1, 1, -1)
