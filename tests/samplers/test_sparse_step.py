"""Leaving the rows alone that a batch does not read changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpa
from fedpa.experiments.models import BagOfWords, NextWordLSTM, bag_of_words, lstm
from fedpa.objectives import Objective, client_data
from fedpa.objectives.checks import check_loss
from fedpa.samplers import Epochs, Steps, draw, iasg
from fedpa.samplers.sparse_step import average_sparsely
from tests.compiling import QUICK
from tests.refusals import refused

WORDS, TAGS, EXAMPLES, LENGTH = 12, 3, 11, 4
KEY = jax.random.key(5)
MODEL = BagOfWords(WORDS, TAGS, key=KEY)
DENSE = Objective(bag_of_words.loss)
SPARSE = Objective(bag_of_words.loss, sparse=bag_of_words.SPARSE)


def client(seed, n=EXAMPLES):
    """Few words, so that batches repeat them; padding is word 0 with weight 0."""
    rng = np.random.default_rng(seed)
    real = np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (n, 1))
    examples = {
        "ids": np.where(real, rng.integers(0, WORDS // 2, (n, LENGTH)), 0).astype(np.int32),
        "weights": (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32),
        "y": (rng.random((n, TAGS)) < 0.4).astype(np.float32),
    }
    return client_data(examples, 16)


def sampled(objective, optimizer, data, window=Epochs(), average=True, model=MODEL, **options):
    sampler = iasg(objective, optimizer, batch_size=4, window=window, average=average, **options)
    return draw(sampler, model, data, KEY, 3)


def assert_close(ours, theirs, atol=2e-6):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


def compiled(*arguments, **options):
    return jax.jit(lambda data: sampled(*arguments, data, **options))


@pytest.mark.parametrize(
    ("window", "average", "reduction"),
    [
        (Epochs(burn_in=1), True, "mean"),
        (Steps(3, burn_in=2, discard=1), True, "sum"),
        (Epochs(), False, "sum"),
    ],
    ids=["epochs", "steps", "last iterate"],
)
def test_samples_are_those_of_dense_gradients(window, average, reduction):
    ours, theirs = (
        compiled(o._replace(reduction=reduction), 2.0, window=window, average=average)
        for o in (SPARSE, DENSE)
    )

    @settings(max_examples=max(20, settings().max_examples))
    @given(st.integers(0, 999), st.sampled_from([1, 4, EXAMPLES]))
    def check(seed, n):
        assert_close(ours(client(seed, n)), theirs(client(seed, n)))

    check()


def test_it_is_taken_for_plain_sgd_only():
    def taken(objective, model=MODEL):
        return average_sparsely(objective, 0.1, True, model) is not None

    assert taken(SPARSE)
    assert not taken(DENSE)
    # A penalty pulls at every row; narrow numbers would be rounded once for every repeat.
    assert not taken(SPARSE._replace(regularizer=lambda m: jnp.sum(m.bias)))
    assert not taken(SPARSE._replace(prior=fedpa.normal_prior(sd=1.0), num_examples=9))
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), MODEL)
    assert not taken(SPARSE, narrow)


def test_a_number_is_the_rate_of_plain_sgd():
    data = client(0)
    assert_close(compiled(DENSE, 0.5)(data), compiled(DENSE, optax.sgd(0.5))(data), atol=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.5, momentum=0.9),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5)),
    ],
    ids=["momentum", "decay"],
)
def test_other_optimizers_fall_back_to_dense_gradients(optimizer):
    data = client(0)
    ours, theirs = (compiled(o, optimizer)(data) for o in (SPARSE, DENSE))
    assert_close(ours, theirs, atol=0)


def test_a_loss_of_rows_that_is_not_one_number_per_example_is_refused():
    broken = bag_of_words.SPARSE._replace(loss=lambda m, batch, key: jnp.sum(m.bias))
    with refused("loss"):
        check_loss(SPARSE._replace(sparse=broken), MODEL, client(0).examples)
    check_loss(SPARSE, MODEL, client(0).examples)


def test_an_empty_client_stays_at_its_start():
    data = client(0)._replace(n=jnp.asarray(0, jnp.int32))
    samples, _ = compiled(SPARSE, 0.5)(data)
    for sample, start in zip(jax.tree.leaves(samples), jax.tree.leaves(MODEL), strict=True):
        np.testing.assert_array_equal(sample, jnp.broadcast_to(start[None], sample.shape))


def test_vectorizes_over_clients():
    clients = jax.tree.map(lambda *a: jnp.stack(a), client(0), client(1, 7))
    chain = compiled(SPARSE, 0.5)
    together = jax.jit(jax.vmap(chain))(clients)
    for index, data in enumerate([client(0), client(1, 7)]):
        assert_close(jax.tree.map(lambda a: a[index], together), chain(data))


def test_an_embedding_is_such_a_table():
    model = jax.jit(lambda key: NextWordLSTM(7, 3, 2, key=key), compiler_options=QUICK)(KEY)
    rng = np.random.default_rng(0)
    examples = {name: rng.integers(0, 8, (9, 4)).astype(np.int32) for name in ("x", "y")}
    data = client_data(examples, 16)
    ours, theirs = (
        compiled(Objective(lstm.loss, sparse=sparse), 0.5, model=model)(data)
        for sparse in (lstm.SPARSE, None)
    )
    assert_close(ours, theirs)
