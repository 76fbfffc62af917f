"""A residual network for CIFAR-100 that two CPU cores train: ResNet-18's parts and input, smaller.

conv 3×3×24 at stride 2, norm, ReLU; three blocks, 24, 48 and 96 wide, on 12×12, 6×6 and 3×3 pixels
of a 24×24 crop; norm, ReLU, mean over pixels, dense 100. The first block has no pre-norm. Not one
of the paper's models.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.experiments.models.kernels.augmentation import Pictures, seen
from fedpa.experiments.models.kernels.convolution import Kernel
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

__all__ = ["MODEL", "SmallResNet", "loss", "regularizer"]


class SmallResNet(eqx.Module):
    stem: Kernel
    stem_norm: GroupNorm
    blocks: tuple[Block, Block, Block]
    final_norm: GroupNorm
    weight: Float[Array, "f classes"]
    bias: Float[Array, " classes"]

    def __init__(self, classes: int = 100, width: int = 24, groups: int = 8, *, key: Key) -> None:
        """`width` is that of the first stage; `groups` must divide it."""
        stem_key, dense_key, *keys = jax.random.split(key, 5)
        self.stem = he_normal(stem_key, 3, 3, width)
        self.stem_norm = GroupNorm(width, groups)
        self.blocks = (
            Block(width, width, groups, pre_norm=False, key=keys[0]),
            Block(width, 2 * width, groups, stride=2, key=keys[1]),
            Block(2 * width, 4 * width, groups, stride=2, key=keys[2]),
        )
        self.final_norm = GroupNorm(4 * width, groups)
        self.weight = 0.01 * jax.random.normal(dense_key, (4 * width, classes))
        self.bias = jnp.zeros(classes)

    def __call__(self, x: Pictures, key: Key | None = None) -> Float[Array, "n classes"]:
        """Logits of pictures; with a key, of random crops of them as in training."""
        h = seen(x, key).astype(self.stem.dtype)
        h = jax.nn.relu(self.stem_norm(convolution(h, self.stem, 2)))
        return classify(self, h)


MODEL = Model(
    "pictures: a small ResNet with group normalization, for two CPU cores",
    lambda key: SmallResNet(key=key),
    parameters=183_004,
)
