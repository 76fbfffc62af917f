"""What a client sends of its precision: A_i exactly, or a sketch whose expectation it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.objectives import Objective, client_data, layer_input
from fedpa.objectives.layer_inputs import Layer
from fedpa.precisions.kronecker import (
    Cut,
    Kronecker,
    Sketch,
    columns,
    cut,
    input_factors,
    pack,
    signs,
    unpack,
)
from tests.compiling import QUICK

FEATURES, OUTPUTS, EXAMPLES = 5, 3, 17
X = np.random.default_rng(0).standard_normal((EXAMPLES, 4)).astype(np.float32)
ROWS = np.concatenate([np.ones((EXAMPLES, 1)), X], axis=1)
GRAM = ROWS.T @ ROWS / EXAMPLES
THETA = {"w": jnp.zeros((4, OUTPUTS)), "b": jnp.zeros(OUTPUTS)}


def loss(theta, batch, key):
    z = layer_input(batch["x"], theta["w"], theta["b"]) @ theta["w"] + theta["b"][None]
    return jnp.sum(z, axis=1)


OBJECTIVE = Objective(loss)


def client(capacity=EXAMPLES, x=X, **options):
    """key → what it sends."""
    options = {"batch_size": 4, "rank": None, "largest": 100} | options
    data = client_data({"x": x}, capacity)
    return lambda key: input_factors(OBJECTIVE, THETA, data, key, **options)[0]


def factors(keys, **options):
    run = jax.jit(jax.vmap(client(**options)), compiler_options=QUICK)
    return jax.device_get(run(keys))


def shape(**options):
    """Of what is sent, and whether it is a sketch."""
    sent = jax.eval_shape(client(**options), jax.random.key(0))
    return sent[0].shape, isinstance(sent, Sketch)


def keys(number):
    return jax.random.split(jax.random.key(1), number)


@pytest.mark.parametrize("rank", [None, 1])
def test_sketches_are_unbiased(rank):
    """E[ZZᵀ] = XᵀX/n, each entry within five of its standard errors."""
    z = factors(keys(4000), rank=2 if rank is None else rank).z
    assert z.dtype == jnp.bfloat16
    z = z.astype(np.float32)
    assert z.shape == (4000, FEATURES, 2 if rank is None else rank)
    products = z @ z.swapaxes(1, 2)
    error = products.std(axis=0) / np.sqrt(len(products))
    np.testing.assert_array_less(np.abs(products.mean(axis=0) - GRAM), 5 * error + 1e-6)
    # The diagonal of the bias's own row is exact in expectation only: it is random, too.
    assert error[0, 0] > 0


def test_the_gram_matrix_is_exact_whatever_the_batches():
    for batch_size in (1, 4, 100):
        (triangle,) = factors(keys(1), batch_size=batch_size, rank="exact").triangles[0]
        np.testing.assert_allclose(triangle, GRAM[np.triu_indices(FEATURES)], rtol=1e-5)


@pytest.mark.parametrize("rank", [1, None])
def test_padding_changes_nothing(rank):
    alone, padded = (factors(keys(2), capacity=c, rank=rank) for c in (EXAMPLES, 64))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(padded), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_an_empty_client_sends_zeros():
    for rank in (1, None):
        sent = factors(keys(1), capacity=8, x=X[:0], rank=rank)
        assert not any(leaf.any() for leaf in jax.tree.leaves(sent))


def test_what_is_smaller_is_sent():
    """In bytes: a sketch has two per number, the Gram matrix, 5·6/2 = 15 numbers, four."""
    assert shape() == shape(rank=100) == ((5, 3), True)
    assert shape(rank=2) == ((5, 2), True)
    assert shape(rank="exact") == ((1, 15), False)
    assert shape(rank=1, largest=1) == ((5, 1), False)  # the diagonal is never sketched
    layers = [Layer((0,), (4,), outputs, 1, out_first=False, table=False) for outputs in (5, 6)]
    assert [columns(layer, None, 100) for layer in layers] == [5, None]
    diagonal = factors(keys(1), rank=1, largest=1).triangles[0]
    np.testing.assert_allclose(diagonal[:, 0], np.diagonal(GRAM), rtol=1e-5)


@given(features=st.integers(1, 40), largest=st.integers(1, 45))
def test_blocks_are_few_and_equal(features, largest):
    blocks, size = cut(features, largest)
    assert size <= largest
    assert 0 <= blocks * size - features < blocks
    assert (blocks - 1) * largest < features


@pytest.mark.parametrize("largest", [1, 2, 3, 5])
def test_blocks_of_a_factor_are_the_diagonal_blocks_of_its_matrix(largest):
    sizes = cut(FEATURES, largest)
    whole = np.zeros((sizes.blocks * sizes.size,) * 2, np.float32)
    whole[:FEATURES, :FEATURES] = GRAM
    wanted = np.stack(
        [whole[i : i + sizes.size, i : i + sizes.size] for i in range(0, len(whole), sizes.size)]
    )
    square = jax.jit(lambda blocks: unpack(pack(Kronecker(blocks)), largest).blocks)(wanted)
    np.testing.assert_array_equal(square, wanted)
    z = np.linalg.cholesky(GRAM).astype(np.float32)
    sketched = jax.jit(lambda z: unpack(Sketch(z), largest).blocks)(z)
    np.testing.assert_allclose(sketched, wanted, atol=1e-5)
    assert Cut(*sketched.shape[:2]) == sizes


def test_signs_are_fair_and_independent():
    omega = np.asarray(jax.jit(lambda key: signs(key, 4000, 70, jnp.float32))(jax.random.key(0)))
    assert set(np.unique(omega)) == {-1.0, 1.0}
    correlations = omega.T @ omega / len(omega) - np.eye(70)
    assert np.abs(correlations).max() < 5 / np.sqrt(len(omega))
    assert np.abs(omega.mean(axis=0)).max() < 5 / np.sqrt(len(omega))
