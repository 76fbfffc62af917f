import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given

from fedpa.experiments.models.lstm import dense
from fedpa.metrics.classification import cross_entropy
from tests.strategies import arrays, labels, powers_of_two


def plain(logits, targets):
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def value_and_gradient(function):
    def both(logits, targets, weights):
        value, pull = jax.vjp(lambda z: function(z, targets), logits)
        return value, pull(weights)[0]

    return jax.jit(both)


BOTH = [value_and_gradient(f) for f in (cross_entropy, plain)]


@given(arrays(2, 4), powers_of_two(-4, 12), labels(4, 2), arrays(2, dtype=np.float32))
def test_values_and_gradients_are_those_of_log_softmax(z, scale, targets, weights):
    """Losses to the rounding of the logits, gradients to that of the logits times 1 or less."""
    logits = (scale * z).astype(np.float32)
    rounding = 8 * np.finfo(np.float32).eps * (1 + np.abs(logits).max())
    ours, theirs = (f(logits, targets, weights) for f in BOTH)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=rounding)
    atol = rounding * np.abs(weights).max()
    np.testing.assert_allclose(ours[1], theirs[1], rtol=0, atol=atol)


def test_vectorizes():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 5)), jnp.float32)
    targets = jnp.asarray([[0, 1, 2], [4, 4, 0]])
    of_one = jax.grad(lambda z, y: jnp.sum(cross_entropy(z, y)))
    gradient = jax.jit(jax.vmap(of_one))(logits, targets)
    expected = jax.nn.softmax(logits) - jax.nn.one_hot(targets, 5)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_narrow_logits_are_summed_wide_and_keep_their_dtype():
    logits = jnp.zeros((1, 10_000), jnp.bfloat16)
    value, pull = jax.vjp(lambda z: cross_entropy(z, jnp.asarray([3])), logits)
    np.testing.assert_allclose(value, [np.log(10_000)], rtol=1e-6)
    assert pull(jnp.ones(1))[0].dtype == jnp.bfloat16


def test_a_dense_layers_bias_is_a_row_of_its_weight():
    rng = np.random.default_rng(0)
    x, w, b, dy = (
        jnp.asarray(rng.standard_normal(s), jnp.float32) for s in [(4, 3), (3, 5), (5,), (4, 5)]
    )

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(function, x, w, b, dy):
        value, pull = jax.vjp(function, x, w, b)
        return value, *pull(dy)

    ours = value_and_gradients(dense, x, w, b, dy)
    theirs = value_and_gradients(lambda x, w, b: x @ w + b[None], x, w, b, dy)
    for a, e, atol in zip(ours, theirs, (1e-5, 1e-4, 1e-4, 1e-4), strict=True):
        np.testing.assert_allclose(a, e, atol=atol)
