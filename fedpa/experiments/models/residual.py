"""What residual networks are made of: blocks in pre-activation order with group normalization.

    norm, ReLU, conv 3×3, norm, ReLU, conv 3×3; plus the input

(He et al., 2016, "identity mappings"). Convolutions have no bias. Where a block changes the number
of channels or pixels its input is projected, by a 1×1 convolution and a norm. Kernels begin as He's
normal, norms as the identity.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import refuse
from fedpa.experiments.models.kernels.convolution import (
    Images,
    Kernel,
    Smaller,
    convolve,
)
from fedpa.experiments.models.kernels.group_norm import group_norm
from fedpa.metrics.classification import cross_entropy
from fedpa.objectives.layer_inputs import convolution_input, layer_input
from fedpa.precision import widened
from fedpa.types import Examples, Key, Losses, Scalar

DECAY = 1e-4


class GroupNorm(eqx.Module):
    scale: Float[Array, " c"]
    offset: Float[Array, " c"]
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
        self,
        channels: int,
        width: int,
        groups: int,
        *,
        stride: int = 1,
        pre_norm: bool = True,
        key: Key,
    ) -> None:
        """From `channels` to `width` channels, every `stride`-th pixel.

        Without `pre_norm` the first norm and ReLU are left out: where the input has just been
        through them.
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


def convolution(x: Images, kernel: Kernel, stride: int = 1) -> Smaller:
    """A layer of these networks: zeros around the image, no bias."""
    return convolve(convolution_input(x, kernel, None, stride, "SAME"), kernel, stride, "SAME")


def classify(network: Any, h: Images) -> Float[Array, "n classes"]:
    """The logits of a network with these parts, from what its stem makes of the pictures."""
    for block in network.blocks:
        h = block(h)
    h = jnp.mean(jax.nn.relu(network.final_norm(h)), axis=(1, 2))
    return layer_input(h, network.weight, network.bias) @ network.weight + network.bias[None]


def he_normal(key: Key, k: int, channels: int, width: int) -> Kernel:
    return jax.nn.initializers.he_normal()(key, (k, k, channels, width))


def decay(params: Any, rate: float) -> Scalar:
    """Rate Σ w², Keras's `l2` (no half), over all weights but those of norms and biases."""
    squares = [jnp.sum(widened(w) ** 2) for w in jax.tree.leaves(params) if w.ndim > 1]
    return rate * jnp.sum(jnp.stack(squares))


def loss(params: Any, batch: Examples, key: Key | None) -> Losses:
    """Cross-entropy of each example; of the middle of its picture without a key."""
    return cross_entropy(params(batch["x"], key), batch["y"])


def regularizer(params: Any) -> Scalar:
    """1e-4 Σ w² over the kernels and the last layer with its bias."""
    return decay(params, DECAY) + DECAY * jnp.sum(widened(params.bias) ** 2)
