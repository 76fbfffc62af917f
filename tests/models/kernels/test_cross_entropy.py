import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

from fedpa.models.kernels.cross_entropy import cross_entropy
from fedpa.models.kernels.dense import dense


def plain(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def value_and_gradient(function):
    def both(logits, targets, weights):
        value, pull = jax.vjp(lambda z: function(z, targets), logits)
        return value, pull(weights)[0]

    return jax.jit(both)


BOTH = [value_and_gradient(f) for f in (cross_entropy, plain)]


@given(st.integers(0, 999), st.sampled_from([0.1, 1.0, 30.0, 1e4]))
def test_values_and_gradients_are_those_of_log_softmax(seed, scale):
    keys = jax.random.split(jax.random.key(seed), 3)
    logits = scale * jax.random.normal(keys[0], (5, 7))
    targets = jax.random.randint(keys[1], (5,), 0, 7)
    weights = jax.random.normal(keys[2], (5,))
    both = [f(logits, targets, weights) for f in BOTH]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-6 * scale + 1e-6)


def test_vectorizes():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.asarray([[0, 1, 2], [4, 4, 0]])
    gradient = jax.vmap(jax.grad(lambda z, y: jnp.sum(cross_entropy(z, y))))(logits, targets)
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(targets, 5)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_narrow_logits_are_summed_wide_and_keep_their_dtype():
    logits = jnp.zeros((1, 10_000), jnp.bfloat16)
    value, pull = jax.vjp(lambda z: cross_entropy(z, jnp.asarray([3])), logits)
    np.testing.assert_allclose(value, [np.log(10_000)], rtol=1e-6)
    assert pull(jnp.ones(1))[0].dtype == jnp.bfloat16


def test_a_dense_layers_bias_is_a_row_of_its_weight():
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, b = (jax.random.normal(k, s) for k, s in zip(keys, [(4, 3), (3, 5), (5,)], strict=True))
    ours = jax.vjp(dense, x, w, b)
    theirs = jax.vjp(lambda x, w, b: x @ w + b[None], x, w, b)
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
    for a, e in zip(ours[1](ours[0]), theirs[1](ours[0]), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-4)
