"""The EMNIST network: its size, and its function written plainly."""

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.models.cnn import CNN, loss
from fedpa.models.kernels.convolution import by_xla


def plain(p, x):
    h = jax.nn.relu(by_xla(x, p.kernels[0]) + p.kernel_biases[0].reshape(1, 1, 1, -1))
    h = jax.nn.relu(by_xla(h, p.kernels[1]) + p.kernel_biases[1].reshape(1, 1, 1, -1))
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    h = jax.nn.relu(h.reshape(len(h), -1) @ p.dense[0] + p.biases[0].reshape(1, -1))
    return h @ p.dense[1] + p.biases[1].reshape(1, -1)


def test_logits_and_gradient_are_those_of_the_plain_network():
    rng = np.random.default_rng(0)
    model = CNN(key=jax.random.key(0))
    model = jax.tree.map(lambda w: w + 0.01, model)  # biases that are not zero
    x = jnp.asarray(rng.random((2, 28, 28, 1)), jnp.float32)
    np.testing.assert_allclose(model(x), plain(model, x), rtol=1e-4, atol=1e-4)
    fast, slow = (jax.grad(lambda p, f=f: jnp.sum(f(p, x) ** 2))(model) for f in (_call, plain))
    for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.abs(b).max()))


def _call(p, x):
    return p(x)


def test_loss_is_per_example_and_drops_out_with_a_key():
    model = CNN(10, key=jax.random.key(0))
    batch = {"x": jnp.ones((3, 28, 28, 1)), "y": jnp.asarray([1, 2, 3], jnp.int32)}
    sure = loss(model, batch, None)
    assert sure.shape == (3,)
    assert not np.allclose(sure, loss(model, batch, jax.random.key(0)))
