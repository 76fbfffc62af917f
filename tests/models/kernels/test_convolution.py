"""Convolution and pooling against their plain formulations, gradients included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.models.kernels.convolution import by_patches, by_xla, convolve, max_pool
from fedpa.models.kernels.dropout import dropout


@settings(max_examples=10)
@given(
    n=st.integers(1, 3),
    height=st.integers(3, 8),
    width=st.integers(3, 8),
    channels=st.sampled_from([1, 2, 5]),
    out=st.sampled_from([1, 4]),
    k=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_convolution_is_xlas(n, height, width, channels, out, k, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, height, width, channels)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((k, k, channels, out)), jnp.float32)
    expected, pull_back = jax.vjp(by_xla, x, w)
    dy = jnp.asarray(rng.standard_normal(expected.shape), jnp.float32)
    for form in (convolve, by_patches):
        value, own = jax.vjp(form, x, w)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)
        for a, b in zip(own(dy), pull_back(dy), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_convolution_over_clients_with_kernels_of_their_own():
    """What the vectorized engine makes of it: another kernel in every lane."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2, 6, 6, 2)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((3, 3, 3, 2, 4)), jnp.float32)

    def gradient(form):
        return jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sum(form(x, w) ** 2))))(w, x)

    np.testing.assert_allclose(gradient(convolve), gradient(by_xla), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 7, 2)])
def test_max_pool_is_xlas(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)

    def plain(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    np.testing.assert_array_equal(max_pool(x), plain(x))
    np.testing.assert_array_equal(
        *(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (max_pool, plain))
    )


def test_dropout_drops_its_share_and_keeps_the_mean():
    x = jnp.ones((200, 100))
    for rate in (0.25, 0.5):
        dropped = np.asarray(dropout(x, rate, jax.random.key(0)))
        error = 4 * np.sqrt(rate * (1 - rate) / x.size)
        assert abs((dropped == 0).mean() - rate) < error
        np.testing.assert_allclose(dropped[dropped > 0], 1 / (1 - rate))
    np.testing.assert_array_equal(dropout(x, 0.25, None), x)
    with pytest.raises(FedpaError, match=r"rate = 0\.3"):
        dropout(x, 0.3, jax.random.key(0))
