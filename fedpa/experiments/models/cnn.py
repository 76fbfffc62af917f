"""The EMNIST convolutional network of Reddi et al., used by the paper (appendix D).

conv 3×3×32, conv 3×3×64, max-pool 2, dropout 0.25, dense 128, dropout 0.5, dense 62; ReLU between.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpa.errors import refuse
from fedpa.experiments.models.convolution import convolve, max_pool
from fedpa.objectives.layer_inputs import (
    Images,
    convolution_input,
    layer_input,
    layer_output,
)
from fedpa.types import Examples, Key, Losses

DROPOUT = (0.25, 0.5)


class CNN(eqx.Module):
    kernels: tuple[Float[Array, "3 3 1 32"], Float[Array, "3 3 32 64"]]
    kernel_biases: tuple[Float[Array, " 32"], Float[Array, " 64"]]
    dense: tuple[Float[Array, "f 128"], Float[Array, "128 classes"]]
    biases: tuple[Float[Array, " 128"], Float[Array, " classes"]]

    def __init__(self, classes: int = 62, *, key: Key) -> None:
        """Glorot's uniform weights and zero biases, Keras's defaults."""
        shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (9216, 128), (128, classes)]
        glorot = jax.nn.initializers.glorot_uniform()
        w = [glorot(k, s) for k, s in zip(jax.random.split(key, 4), shapes, strict=True)]
        b = [jnp.zeros(shape[-1]) for shape in shapes]
        self.kernels, self.kernel_biases = (w[0], w[1]), (b[0], b[1])
        self.dense, self.biases = (w[2], w[3]), (b[2], b[3])

    def __call__(self, x: Images, key: Key | None = None) -> Float[Array, "n classes"]:
        """Logits of images n×28×28×1; with a key, units are dropped out as in training."""
        first, second = (None, None) if key is None else jax.random.split(key)
        x = convolution_input(x, self.kernels[0], self.kernel_biases[0])
        z = layer_output(convolve(x, self.kernels[0]), self.kernels[0])
        h = jax.nn.relu(z + _row(self.kernel_biases[0], x))
        h = convolution_input(h, self.kernels[1], self.kernel_biases[1])
        # ReLU and a bias commute with a maximum: after the pool there is a quarter to do.
        h = max_pool(layer_output(convolve(h, self.kernels[1]), self.kernels[1]))
        h = jax.nn.relu(h + _row(self.kernel_biases[1], h))
        h = dropout(h.reshape(h.shape[0], -1), DROPOUT[0], first)
        h = layer_input(h, self.dense[0], self.biases[0])
        z = layer_output(h @ self.dense[0], self.dense[0])
        h = jax.nn.relu(z + _row(self.biases[0], h[:, :1]))
        h = layer_input(dropout(h, DROPOUT[1], second), self.dense[1], self.biases[1])
        return layer_output(h @ self.dense[1], self.dense[1]) + _row(self.biases[1], h[:, :1])


def loss(params: CNN, batch: Examples, key: Key | None) -> Losses:
    """Cross-entropy of each example of {"x": images, "y": labels}; no dropout without a key."""
    logits = params(batch["x"], key)
    losses: Losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses


def dropout(x: jax.Array, rate: float, key: Key | None) -> jax.Array:
    """Zero each number with probability `rate`, a multiple of 1/256, and scale up the rest.

    From eight random bits a unit: a quarter of the randomness of the usual way. Without a key
    nothing is dropped.
    """
    threshold = round(256 * rate)
    if not 0 <= rate < 1 or threshold != 256 * rate:
        raise refuse("rate", rate, "must be a multiple of 1/256 in [0, 1)")
    if key is None or threshold == 0:
        return x
    keep = jax.random.bits(key, x.shape, jnp.uint8) >= jnp.uint8(threshold)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def _row(bias: Array, like: Array) -> Array:
    """A bias with the leading axes that strict promotion asks for."""
    return bias.reshape((1,) * (like.ndim - 1) + (-1,))
