import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.models import NextWordLSTM
from fedpa.models.lstm import PAD, SPARSE, loss, token_losses
from fedpa.objectives import Objective, client_data, client_loss
from fedpa.objectives.sparse_table import gathered

WORDS, EMBEDDING, HIDDEN = 7, 3, 4
KEY = jax.random.key(0)
MODEL = NextWordLSTM(WORDS, EMBEDDING, HIDDEN, key=KEY)
# Sentences of begin (9), words, end (10), padded.
TOKENS = np.array([[9, 1, 2, 3, 10, 0], [9, 4, 10, 0, 0, 0], [9, 5, 5, 8, 1, 10]], np.int32)
BATCH = {"x": jnp.asarray(TOKENS[:, :-1]), "y": jnp.asarray(TOKENS[:, 1:])}


def by_hand(model, tokens):
    """One sentence, word by word, in double precision."""
    m = jax.tree.map(lambda a: np.asarray(a, np.float64), model)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    h = c = np.zeros(HIDDEN)
    logits = []
    for token in tokens:
        z = m.embedding[token] @ m.input_weight + h @ m.recurrent_weight + m.bias
        i, f, g, o = np.split(z, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        hidden = h @ m.hidden_weight + m.hidden_bias
        logits.append(hidden @ m.output_weight + m.output_bias)
    return np.stack(logits)


def test_logits_are_the_models():
    logits = MODEL(BATCH["x"])
    assert logits.shape == (3, 5, WORDS + 4)
    for sentence, tokens in zip(logits, TOKENS[:, :-1], strict=True):
        np.testing.assert_allclose(sentence, by_hand(MODEL, tokens), atol=1e-5)


def test_losses_are_of_real_targets_only():
    losses, mask = token_losses(MODEL, BATCH)
    np.testing.assert_array_equal(mask, TOKENS[:, 1:] != PAD)
    log_p = jax.nn.log_softmax(MODEL(BATCH["x"]))
    expected = -jnp.take_along_axis(log_p, BATCH["y"][..., None], axis=2)[..., 0]
    np.testing.assert_allclose(losses, np.where(mask, expected, 0), atol=1e-5)
    per_sentence = np.asarray(losses).sum(1) / np.asarray(mask).sum(1)
    np.testing.assert_allclose(loss(MODEL, BATCH, KEY), per_sentence, rtol=1e-6)


def test_a_sentence_without_targets_has_loss_and_gradient_0():
    batch = {"x": jnp.zeros((2, 5), jnp.int32), "y": jnp.zeros((2, 5), jnp.int32)}
    value, gradient = jax.value_and_grad(lambda m: jnp.sum(loss(m, batch, KEY)))(MODEL)
    assert float(value) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_longer_padding_changes_no_gradient():
    longer = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 2))), BATCH)
    one, other = (jax.grad(lambda m: jnp.sum(loss(m, b, KEY)))(MODEL) for b in (BATCH, longer))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_loss_depends_on_the_rows_that_are_read():
    rows = gathered(SPARSE, MODEL, BATCH)
    assert rows.embedding.shape == (5, 3, EMBEDDING)
    np.testing.assert_array_equal(SPARSE.loss(rows, BATCH, KEY), loss(MODEL, BATCH, KEY))


def test_vectorizes_over_clients_with_models_of_their_own():
    models = jax.vmap(lambda k: NextWordLSTM(WORDS, EMBEDDING, HIDDEN, key=k))(
        jax.random.split(KEY, 2)
    )
    together = jax.vmap(lambda m: loss(m, BATCH, KEY))(models)
    for index in range(2):
        alone = loss(jax.tree.map(lambda a: a[index], models), BATCH, KEY)
        np.testing.assert_allclose(together[index], alone, rtol=1e-5)


def test_is_an_objective():
    data = client_data(jax.tree.map(np.asarray, BATCH), 8)
    mean = client_loss(Objective(loss, sparse=SPARSE), MODEL, data, KEY)
    assert float(mean) == pytest.approx(float(jnp.mean(loss(MODEL, BATCH, KEY))), rel=1e-6)


def test_begins_as_in_keras():
    np.testing.assert_array_equal(MODEL.bias, np.repeat([0, 1, 0, 0], HIDDEN))
    gram = MODEL.recurrent_weight @ MODEL.recurrent_weight.T
    np.testing.assert_allclose(gram, np.eye(HIDDEN), atol=1e-5)
    assert np.abs(MODEL.embedding).max() <= 0.05
