import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.experiments.models.resnet import EPSILON, GroupNorm, group_norm
from tests.compiling import QUICK


def plain(x, scale, offset, groups):
    """The definition, differentiated as it stands."""
    n, h, w, c = x.shape
    grouped = x.reshape(n, h, w, groups, c // groups)
    mean = jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.var(grouped, axis=(1, 2, 4), keepdims=True)
    normal = ((grouped - mean) / jnp.sqrt(variance + EPSILON)).reshape(x.shape)
    return normal * scale.reshape(1, 1, 1, c) + offset.reshape(1, 1, 1, c)


def value_and_gradients(function):
    def both(x, scale, offset, dy, groups):
        value, pull = jax.vjp(lambda *a: function(*a, groups), x, scale, offset)
        return value, *pull(dy)

    return both


BOTH = value_and_gradients(group_norm), value_and_gradients(plain)
OURS, PLAIN = (jax.jit(f, static_argnums=4, compiler_options=QUICK) for f in BOTH)


def inputs(seed, clients=(), dtype=jnp.float32):
    shapes = [(2, 3, 5, 6), (6,), (6,), (2, 3, 5, 6)]
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((*clients, *s)).astype(dtype)) for s in shapes]


@given(st.sampled_from([1, 3]), st.integers(0, 999))
def test_values_and_gradients_are_those_of_the_definition(groups, seed):
    with jax.enable_x64(True):
        arrays = inputs(seed, dtype=jnp.float64)
        for ours, theirs in zip(OURS(*arrays, groups), PLAIN(*arrays, groups), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-11)


def test_groups_are_of_consecutive_channels_and_one_image():
    x, *_ = inputs(0)
    y = np.asarray(group_norm(x, jnp.ones(6), jnp.zeros(6), 2), np.float64)
    for image, normal in zip(np.asarray(x, np.float64), y, strict=True):
        for group in (slice(0, 3), slice(3, 6)):
            numbers = image[..., group]
            expected = (numbers - numbers.mean()) / np.sqrt(numbers.var() + 1e-3)
            np.testing.assert_allclose(normal[..., group], expected, atol=1e-5)


def test_a_large_mean_costs_no_digits():
    """E[x²] − E[x]² would be all rounding here."""
    x = 4096 + jnp.asarray(np.random.default_rng(0).integers(0, 2, (1, 8, 8, 4)), jnp.float32)
    ours, theirs = (group_norm(x - m, jnp.ones(4), jnp.zeros(4), 2) for m in (0, 4096))
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_vectorizes_over_clients_with_parameters_of_their_own():
    arrays = inputs(1, clients=(3,))
    ours, theirs = (
        jax.jit(jax.vmap(lambda *a, f=f: f(*a, 3)), compiler_options=QUICK)(*arrays) for f in BOTH
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_narrow_images_are_summed_wide_and_keep_their_dtype():
    x, scale, offset, dy = (a.astype(jnp.bfloat16) for a in inputs(2))
    for narrow, exact in zip(OURS(x, scale, offset, dy, 2), PLAIN(*inputs(2), 2), strict=True):
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(narrow, np.float32), exact, atol=0.15)


@pytest.mark.parametrize("groups", [0, 4, 12])
def test_groups_must_divide_the_channels(groups):
    with pytest.raises(FedpaError, match=rf"groups = {groups}: must divide"):
        GroupNorm(6, groups)
