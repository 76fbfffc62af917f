"""The perceptron of `fedpa run digits`, and a client's share of its images, in plain JAX."""

import itertools
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (64, 32, 10)


def fresh():
    rng = np.random.default_rng(0)
    layers = []
    for inputs, outputs in itertools.pairwise(SIZES):
        bound = 1 / np.sqrt(inputs)
        layers.append(rng.uniform(-bound, bound, (inputs, outputs)).astype(np.float32))
        layers.append(rng.uniform(-bound, bound, outputs).astype(np.float32))
    return layers


def client_data(number):
    """As many images as a client of the digits has.

    Kept in a file, as ours are: importing scikit-learn takes a second.
    """
    kept = Path(os.environ["FLWR_HOME"]) / f"digits{number}.npz"
    if not kept.is_file():
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        np.savez(kept, pixels=pixels, labels=labels)
    with np.load(kept) as stored:
        pixels, labels = stored["pixels"], stored["labels"]
    rows = np.random.default_rng([0, number]).choice(len(pixels), 15, replace=False)
    return (pixels[rows] / 16).astype(np.float32), labels[rows].astype(np.int32)


def loss(params, x, y):
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])


@jax.jit
def train_locally(params, x, y, orders):
    """SGD in the orders given, batches of five."""

    def step(params, rows):
        grads = jax.grad(loss)(params, x[rows], y[rows])
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), None

    return jax.lax.scan(step, params, orders.reshape(-1, 5))[0]
