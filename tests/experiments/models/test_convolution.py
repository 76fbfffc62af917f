"""Convolution and pooling against their plain formulations, gradients included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.experiments.models.cnn import dropout
from fedpa.experiments.models.convolution import (
    by_patches,
    by_xla,
    convolve,
    max_pool,
    overlapping_max_pool,
)
from tests.compiling import QUICK


@functools.partial(jax.jit, static_argnums=(0, 4, 5), compiler_options=QUICK)
def value_and_pull_back(form, x, w, dy, stride, padding):
    """Every example has shapes of its own: one program for each form, and soon compiled."""
    value, pull_back = jax.vjp(lambda x, w: form(x, w, stride, padding), x, w)
    return value, *pull_back(dy)


@settings(max_examples=10)
@given(
    n=st.integers(1, 3),
    height=st.integers(3, 8),
    width=st.integers(3, 8),
    channels=st.sampled_from([1, 2, 5]),
    out=st.sampled_from([1, 4]),
    k=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.sampled_from(["VALID", "SAME"]),
    seed=st.integers(0, 9),
)
def test_convolution_is_xlas(n, height, width, channels, out, k, stride, padding, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((n, height, width, channels)).astype(np.float32))
    w = jnp.asarray(rng.standard_normal((k, k, channels, out)).astype(np.float32))
    shape = jax.eval_shape(lambda: by_xla(x, w, stride, padding)).shape
    dy = jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    expected = value_and_pull_back(by_xla, x, w, dy, stride, padding)
    for form in (convolve, by_patches):
        found = value_and_pull_back(form, x, w, dy, stride, padding)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pixels", "k", "stride"), [(24, 7, 2), (12, 3, 2), (6, 3, 1), (7, 1, 2)])
def test_same_padding_is_xlas_at_the_sizes_of_resnets(pixels, k, stride):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, pixels, pixels, 3)).astype(np.float32))
    w = jnp.asarray(rng.standard_normal((k, k, 3, 4)).astype(np.float32))

    def value_and_gradients(form):
        def total(x, w):
            y = form(x, w, stride, "SAME")
            return jnp.sum(jnp.sin(y)), y

        both = jax.value_and_grad(total, (0, 1), has_aux=True)
        return jax.jit(both, compiler_options=QUICK)(x, w)

    ours, xlas = value_and_gradients(convolve), value_and_gradients(by_xla)
    assert ours[0][1].shape == (2, -(-pixels // stride), -(-pixels // stride), 4)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(xlas), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_convolution_over_clients_with_kernels_of_their_own():
    """What the vectorized engine makes of it: another kernel in every lane."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2, 6, 6, 2)).astype(np.float32))
    w = jnp.asarray(rng.standard_normal((3, 3, 3, 2, 4)).astype(np.float32))

    def gradient(form):
        lanes = jax.vmap(jax.grad(lambda w, x: jnp.sum(form(x, w) ** 2)))
        return jax.jit(lanes, compiler_options=QUICK)(w, x)

    np.testing.assert_allclose(gradient(convolve), gradient(by_xla), rtol=1e-4, atol=1e-3)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def value_and_gradient(function, x):
    value, pull_back = jax.vjp(function, x)
    return value, pull_back(2 * value)[0]


@pytest.mark.parametrize("shape", [(2, 4, 6, 3), (1, 5, 7, 2)])
def test_max_pool_is_xlas(shape):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)

    def plain(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    for ours, theirs in zip(*(value_and_gradient(f, x) for f in (max_pool, plain)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 12, 12, 3), (1, 5, 8, 2), (1, 1, 1, 1)])
def test_overlapping_max_pool_is_xlas(shape):
    """Negative throughout: the padding must never win."""
    x = jnp.asarray(-1 - np.random.default_rng(0).random(shape), jnp.float32)

    def plain(x):
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    ours, theirs = (value_and_gradient(f, x) for f in (overlapping_max_pool, plain))
    np.testing.assert_array_equal(ours[0], theirs[0])
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)


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
