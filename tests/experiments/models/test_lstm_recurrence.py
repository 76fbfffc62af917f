import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.experiments.models.lstm import input_share, lstm
from tests.compiling import QUICK


def plain(x, input_weight, recurrent_weight, bias):
    """The recurrence as it is written, differentiated as it stands."""

    def step(carry, x_t):
        h, c = carry
        i, f, g, o = jnp.split(x_t @ input_weight + h @ recurrent_weight + bias[None], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[1], recurrent_weight.shape[0]), x.dtype)
    return jax.lax.scan(step, (start, start), x)[1]


def ours(x, input_weight, recurrent_weight, bias):
    return lstm(input_share(x, input_weight, bias), recurrent_weight)


def inputs(t, b, i, h, seed, dtype=jnp.float32, clients=()):
    shapes = [(t, b, i), (i, 4 * h), (h, 4 * h), (4 * h,), (t, b, h)]
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((*clients, *s)).astype(dtype)) for s in shapes]


def value_and_gradients(function):
    def both(*arrays):
        *arguments, direction = arrays
        value, pull = jax.vjp(function, *arguments)
        return value, *pull(direction)

    return both


def compiled(function):
    return jax.jit(function, compiler_options=QUICK)


BOTH = value_and_gradients(ours), value_and_gradients(plain)
OURS, PLAIN = map(compiled, BOTH)


def assert_same(ours, theirs, **tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), **tolerance
        )


# A few sizes, each compiled once; the numbers are drawn.
@given(st.sampled_from([(1, 1, 1, 1), (4, 3, 2, 5), (6, 1, 3, 2)]), st.integers(0, 999))
def test_values_and_gradients_are_those_of_the_recurrence(sizes, seed):
    with jax.enable_x64(True):
        arrays = inputs(*sizes, seed, jnp.float64)
        assert_same(OURS(*arrays), PLAIN(*arrays), atol=1e-12)


@pytest.mark.parametrize("batched", [(0, 0, 0, 0, 0), (0, None, None, None, 0)])
def test_vectorizes_over_clients_with_weights_of_their_own_or_shared(batched):
    arrays = inputs(4, 3, 2, 5, seed=1, clients=(3,))
    arrays = [a if axis == 0 else a[0] for a, axis in zip(arrays, batched, strict=True)]
    ours, theirs = (compiled(jax.vmap(f, batched))(*arrays) for f in BOTH)
    assert_same(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_keeps_the_dtype(dtype):
    arrays = inputs(3, 2, 2, 3, seed=2, dtype=dtype)
    atol = 0.1 if dtype == jnp.bfloat16 else 1e-5
    assert_same(OURS(*arrays), PLAIN(*arrays), atol=atol)
