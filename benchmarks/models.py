"""Our side's models: (loss, parameters) from a work's initial parameters.

The works' CNN, LSTM and bag of words are models that `fedpa.models` is to provide; each function
below is then the one place to call them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Loss = Callable[[Any, Any, Any], jax.Array]
Arrays = dict[str, np.ndarray]


def logistic(start: Arrays) -> tuple[Loss, Any]:
    def loss(params: Any, batch: Any, _: Any) -> jax.Array:
        return _cross_entropy(batch["x"] @ params["w"] + params["b"][None], batch["y"])

    return loss, start


def cnn(start: Arrays) -> tuple[Loss, Any]:  # fedpa.models.cnn, when it is there
    def forward(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(_convolve(x, params["conv1.w"]) + params["conv1.b"])
        x = jax.nn.relu(_convolve(x, params["conv2.w"]) + params["conv2.b"])
        n, h, w, c = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4)).reshape(n, -1)
        x = jax.nn.relu(x @ params["dense1.w"] + params["dense1.b"])
        return x @ params["dense2.w"] + params["dense2.b"]

    return lambda params, batch, _: _cross_entropy(forward(params, batch["x"]), batch["y"]), start


def lstm(start: Arrays) -> tuple[Loss, Any]:  # fedpa.models.lstm, when it is there
    def forward(params: Any, x: jax.Array) -> jax.Array:
        words = params["embedding"][x.T] @ params["lstm.wx"] + params["lstm.b"]

        def step(carry: Any, word: jax.Array) -> tuple[Any, jax.Array]:
            hidden, cell = carry
            i, f, g, o = jnp.split(word + hidden @ params["lstm.wh"], 4, axis=-1)
            cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
            hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
            return (hidden, cell), hidden

        zero = jnp.zeros((x.shape[0], params["lstm.wh"].shape[0]))
        _, hidden = jax.lax.scan(step, (zero, zero), words)
        out = hidden @ params["dense1.w"] + params["dense1.b"]
        return jnp.swapaxes(out @ params["dense2.w"] + params["dense2.b"], 0, 1)

    def loss(params: Any, batch: Any, _: Any) -> jax.Array:
        return _cross_entropy(forward(params, batch["x"]), batch["y"]).mean(-1)

    return loss, start


def bow(start: Arrays) -> tuple[Loss, Any]:  # fedpa.models.bag_of_words, when it is there
    def loss(params: Any, batch: Any, _: Any) -> jax.Array:
        logits = params["w"][batch["x"]].mean(1) + params["b"]
        return optax.sigmoid_binary_cross_entropy(logits, batch["y"]).mean(-1)

    return loss, start


MODELS = {"logistic": logistic, "cnn": cnn, "lstm": lstm, "bow": bow}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A valid convolution as one matrix product, which XLA compiles well inside of loops, too."""
    k, _, channels, out = kernel.shape
    h, w = x.shape[1] - k + 1, x.shape[2] - k + 1
    patches = [x[:, i : i + h, j : j + w] for i in range(k) for j in range(k)]
    return jnp.concatenate(patches, -1) @ kernel.reshape(k * k * channels, out)
