"""CIFAR-100's ResNet-18 with group normalization of Reddi et al., used by the paper (appendix D).

conv 7×7×64 at stride 2, norm, ReLU, max-pool 3×3 at stride 2; four stages of two blocks, 64, 128,
256 and 512 wide, all at stride 1 (the original hands no stride on: from a 24×24 crop on all of them
work on 6×6 pixels); norm, ReLU, mean over pixels, dense 100. The first block has no pre-norm.

A batch is {"x": bytes (b, 32, 32, 3), "y": (b,)}. The number of groups was a default of the library
the original used, 2 at first and 32 later.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.experiments.models.kernels.augmentation import Pictures, seen
from fedpa.experiments.models.kernels.convolution import Kernel, overlapping_max_pool
from fedpa.experiments.models.model import Model
from fedpa.experiments.models.residual import (
    Block,
    GroupNorm,
    classify,
    convolution,
    he_normal,
    loss,
    regularizer,
)
from fedpa.types import Key

__all__ = ["MODEL", "ResNet18", "loss", "regularizer"]

STAGES, BLOCKS = 4, 2


class ResNet18(eqx.Module):
    stem: Kernel
    stem_norm: GroupNorm
    blocks: tuple[Block, ...]
    final_norm: GroupNorm
    weight: Float[Array, "f classes"]
    bias: Float[Array, " classes"]

    def __init__(self, classes: int = 100, width: int = 64, groups: int = 32, *, key: Key) -> None:
        """`width` is that of the first stage; `groups` must divide it."""
        stem_key, dense_key, *keys = jax.random.split(key, 2 + STAGES * BLOCKS)
        self.stem = he_normal(stem_key, 7, 3, width)
        self.stem_norm = GroupNorm(width, groups)
        outputs = [width * 2**stage for stage in range(STAGES) for _ in range(BLOCKS)]
        inputs = [width, *outputs[:-1]]
        self.blocks = tuple(
            Block(inputs[i], outputs[i], groups, pre_norm=i > 0, key=keys[i])
            for i in range(STAGES * BLOCKS)
        )
        self.final_norm = GroupNorm(outputs[-1], groups)
        self.weight = 0.01 * jax.random.normal(dense_key, (outputs[-1], classes))
        self.bias = jnp.zeros(classes)

    def __call__(self, x: Pictures, key: Key | None = None) -> Float[Array, "n classes"]:
        """Logits of pictures; with a key, of random crops of them as in training."""
        h = seen(x, key).astype(self.stem.dtype)
        h = self.stem_norm(convolution(h, self.stem, 2))
        # ReLU commutes with a maximum: after the pool there is a quarter to do.
        h = jax.nn.relu(overlapping_max_pool(h))
        return classify(self, h)


MODEL = Model(
    "pictures: ResNet-18 with group normalization, for 24×24 crops",
    lambda key: ResNet18(key=key),
    parameters=11_227_812,
)
