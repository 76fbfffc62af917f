"""Perceptrons of one hidden layer, ReLU between: 64 pixels, 32 hidden units, 10 classes by default.

That is the model of the task `digits`; `emnist --model mlp` has 784 pixels and 128 hidden units,
`emnist --model logistic` no hidden layer.
"""

import functools

import equinox as eqx
import jax
import optax

from fedpa.objectives.layer_inputs import layer_input, layer_output, over_examples
from fedpa.types import Examples, Key, Losses


def init(key: Key, pixels: int = 64, hidden: int = 32, classes: int = 10) -> eqx.nn.MLP:
    """Draw a model of the layers' default initialization; without hidden units it is one layer."""
    return eqx.nn.MLP(pixels, classes, hidden, depth=int(hidden > 0), key=key)


def logits(params: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    """Logits of images, n×pixels or n×height×width×1."""
    x = x.reshape(x.shape[0], -1)
    return over_examples(functools.partial(_logits, params))(x)


def _logits(params: eqx.nn.MLP, image: jax.Array) -> jax.Array:
    """`params(image)`, its layers shown."""
    h = image
    for layer in params.layers:
        h = layer_input(h, layer.weight, layer.bias, out_first=True)
        z = layer_output(layer(h), layer.weight)
        h = jax.nn.relu(z)
    return z


def loss(params: eqx.nn.MLP, batch: Examples, key: Key) -> Losses:
    """Cross-entropy of each example of {"x": images, "y": labels}."""
    del key
    scores = logits(params, batch["x"])
    losses: Losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
    return losses
