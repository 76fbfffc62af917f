"""Leaving the rows alone that a batch does not read changes no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpa import FedpaError
from fedpa.experiments.models import BagOfWords, NextWordLSTM, bag_of_words, lstm
from fedpa.objectives import Objective, client_data
from fedpa.objectives.objective import check_loss
from fedpa.samplers import Epochs, Steps, draw, iasg
from fedpa.samplers.scaling import scaling
from fedpa.samplers.sparse_step import sparse_walk
from tests.compiling import QUICK

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
        compiled(o._replace(reduction=reduction), optax.sgd(2.0), window=window, average=average)
        for o in (SPARSE, DENSE)
    )

    @settings(max_examples=20)
    @given(st.integers(0, 999), st.sampled_from([1, 4, EXAMPLES]))
    def check(seed, n):
        assert_close(ours(client(seed, n)), theirs(client(seed, n)))

    check()


def test_it_is_taken_for_plain_sgd_only():
    def taken(objective, optimizer, model=MODEL):
        return sparse_walk(objective, optimizer, True, model) is not None

    assert taken(SPARSE, optax.sgd(0.1))
    assert not taken(DENSE, optax.sgd(0.1))
    assert not taken(SPARSE, optax.sgd(0.1, momentum=0.9))
    # A penalty pulls at every row; narrow numbers would be rounded once for every repeat.
    assert not taken(SPARSE._replace(regularizer=lambda m: jnp.sum(m.bias)), optax.sgd(0.1))
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), MODEL)
    assert not taken(SPARSE, optax.sgd(0.1), narrow)


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
    with pytest.raises(FedpaError, match="one number per example"):
        check_loss(SPARSE._replace(sparse=broken), MODEL, client(0).examples)
    check_loss(SPARSE, MODEL, client(0).examples)


def test_an_empty_client_stays_at_its_start():
    data = client(0)._replace(n=jnp.asarray(0, jnp.int32))
    samples, _ = compiled(SPARSE, optax.sgd(0.5))(data)
    for sample, start in zip(jax.tree.leaves(samples), jax.tree.leaves(MODEL), strict=True):
        np.testing.assert_array_equal(sample, jnp.broadcast_to(start[None], sample.shape))


def test_vectorizes_over_clients():
    clients = jax.tree.map(lambda *a: jnp.stack(a), client(0), client(1, 7))
    chain = compiled(SPARSE, optax.sgd(0.5))
    together = jax.jit(jax.vmap(chain))(clients)
    for index, data in enumerate([client(0), client(1, 7)]):
        assert_close(jax.tree.map(lambda a: a[index], together), chain(data))


def test_an_embedding_is_such_a_table():
    model = jax.jit(lambda key: NextWordLSTM(7, 3, 2, key=key), compiler_options=QUICK)(KEY)
    rng = np.random.default_rng(0)
    examples = {name: rng.integers(0, 8, (9, 4)).astype(np.int32) for name in ("x", "y")}
    data = client_data(examples, 16)
    ours, theirs = (
        compiled(Objective(lstm.loss, sparse=sparse), optax.sgd(0.5), model=model)(data)
        for sparse in (lstm.SPARSE, None)
    )
    assert_close(ours, theirs)


PLAIN = {
    "sgd": (optax.sgd(0.1), -0.1),
    "identity": (optax.identity(), 1.0),
    "chain": (optax.chain(optax.scale(3.0), optax.sgd(0.5)), -1.5),
    "divided": (optax.stateless(lambda u, _: jax.tree.map(lambda x: -x / 4, u)), -0.25),
}
OTHERS = {
    "momentum": optax.sgd(0.1, 0.9),
    "adam": optax.adam(0.1),
    "schedule": optax.sgd(optax.constant_schedule(0.1)),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "clipped": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "clipped norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "signs": optax.chain(optax.scale_by_sign(), optax.sgd(0.1)),
    "squares": optax.stateless(lambda u, _: jax.tree.map(lambda x: x * x, u)),
    "by parameters": optax.stateless(lambda u, p: jax.tree.map(lambda x, y: x * y, u, p)),
    "by position": optax.stateless(
        lambda u, _: jax.tree.map(
            lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), u
        )
    ),
    "nothing": optax.set_to_zero(),
    "swapped": optax.stateless(lambda u, _: {"a": u["b"], "b": u["a"]}),
}
THETA = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}


@pytest.mark.parametrize("name", PLAIN)
def test_finds_the_number_that_an_optimizer_multiplies_by(name):
    optimizer, factor = PLAIN[name]
    np.testing.assert_allclose(jax.tree.leaves(scaling(optimizer, THETA)), [factor] * 2, rtol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_takes_nothing_else_for_a_multiplication(name):
    assert scaling(OTHERS[name], THETA) is None


def test_the_number_may_be_known_to_the_compiled_program_only():
    def updated(rate):
        scaled = optax.stateless(lambda u, _: jax.tree.map(lambda x: rate * x, u))
        return scaling(optax.chain(optax.sgd(0.1), scaled), THETA)

    np.testing.assert_allclose(jax.jit(updated)(jnp.asarray(0.5))["a"], -0.05, rtol=1e-6)
