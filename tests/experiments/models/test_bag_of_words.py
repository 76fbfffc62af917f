import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedpa.experiments.models import BagOfWords
from fedpa.experiments.models.bag_of_words import SPARSE, loss
from fedpa.objectives.objective import gather_rows

WORDS, TAGS, BATCH, LENGTH = 6, 3, 4, 5
KEY = jax.random.key(0)
MODEL = BagOfWords(WORDS, TAGS, key=KEY)


def batch_of(seed):
    """Bags with repeated words and padding (word 0 with weight 0)."""
    rng = np.random.default_rng(seed)
    real = np.arange(LENGTH) < rng.integers(0, LENGTH + 1, (BATCH, 1))
    return {
        "ids": jnp.asarray(np.where(real, rng.integers(0, WORDS, (BATCH, LENGTH)), 0), jnp.int32),
        "weights": jnp.asarray(real / np.maximum(real.sum(1, keepdims=True), 1), jnp.float32),
        "y": jnp.asarray(rng.random((BATCH, TAGS)) < 0.4, jnp.float32),
    }


def dense_loss(model, batch):
    """The same with bags as wide as the vocabulary."""
    bags = jnp.sum(jax.nn.one_hot(batch["ids"], WORDS) * batch["weights"][..., None], axis=1)
    z = bags @ model.weight + model.bias[None]
    p = jax.nn.sigmoid(z)
    return -jnp.mean(batch["y"] * jnp.log(p) + (1 - batch["y"]) * jnp.log(1 - p), axis=1)


def losses_and_gradient(loss):
    return jax.jit(
        lambda m, batch: (loss(m, batch), jax.grad(lambda m: jnp.sum(loss(m, batch)))(m))
    )


BOTH = [losses_and_gradient(f) for f in (lambda m, batch: loss(m, batch, KEY), dense_loss)]


@given(st.integers(0, 999))
def test_losses_and_gradients_are_those_of_dense_bags(seed):
    batch = batch_of(seed)
    ours, theirs = (both(MODEL, batch) for both in BOTH)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_loss_depends_on_the_rows_that_are_read():
    batch = batch_of(1)
    rows = gather_rows(SPARSE, MODEL, batch)
    assert rows.weight.shape == (BATCH, LENGTH, TAGS)
    np.testing.assert_array_equal(SPARSE.loss(rows, batch, KEY), loss(MODEL, batch, KEY))


def test_labels_may_be_bytes():
    batch = batch_of(2)
    as_bytes = batch | {"y": batch["y"].astype(jnp.uint8)}
    np.testing.assert_array_equal(loss(MODEL, as_bytes, KEY), loss(MODEL, batch, KEY))
