"""The EMNIST network: its size, and its function written plainly."""

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.experiments.models.cnn import CNN, loss
from fedpa.experiments.models.convolution import by_xla
from tests.compiling import QUICK
from tests.experiments.models.test_resnet18 import assert_same, drawn, logits_and_gradient


def plain(p, x):
    h = jax.nn.relu(by_xla(x, p.kernels[0]) + p.kernel_biases[0].reshape(1, 1, 1, -1))
    h = jax.nn.relu(by_xla(h, p.kernels[1]) + p.kernel_biases[1].reshape(1, 1, 1, -1))
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = jax.nn.relu(h.reshape(len(h), -1) @ p.dense[0] + p.biases[0].reshape(1, -1))
    return h @ p.dense[1] + p.biases[1].reshape(1, -1)


def test_logits_and_gradient_are_those_of_the_plain_network():
    rng = np.random.default_rng(0)
    model = jax.jit(lambda key: CNN(key=key), compiler_options=QUICK)(jax.random.key(0))
    model = jax.tree.map(lambda w: w + 0.01, model)  # biases that are not zero
    x = jnp.asarray(rng.random((2, 28, 28, 1)), jnp.float32)
    fast = logits_and_gradient(lambda p: p(x), model)
    slow = logits_and_gradient(lambda p: plain(p, x), model)
    np.testing.assert_allclose(fast[0], slow[0], rtol=1e-4, atol=1e-4)
    assert_same(fast, slow)


def test_loss_is_per_example_and_drops_out_with_a_key():
    model = drawn(lambda key: CNN(10, key=key))
    batch = {"x": jnp.ones((3, 28, 28, 1)), "y": jnp.asarray([1, 2, 3], jnp.int32)}
    run = jax.jit(loss, compiler_options=QUICK)
    sure = run(model, batch, None)
    assert sure.shape == (3,)
    assert not np.allclose(sure, run(model, batch, jax.random.key(0)))
