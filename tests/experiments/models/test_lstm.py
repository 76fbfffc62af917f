import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.experiments.models import NextWordLSTM
from fedpa.experiments.models.lstm import PAD, SPARSE, loss
from fedpa.objectives import Objective, client_data, client_loss
from fedpa.objectives.objective import gather_rows
from tests.compiling import QUICK
from tests.experiments.models.token_losses import token_losses

WORDS, EMBEDDING, HIDDEN = 7, 3, 4
KEY = jax.random.key(0)
MODEL = jax.jit(
    lambda key: NextWordLSTM(WORDS, EMBEDDING, HIDDEN, key=key), compiler_options=QUICK
)(KEY)
# Sentences of begin (9), words, end (10), padded.
TOKENS = np.array([[9, 1, 2, 3, 10, 0], [9, 4, 10, 0, 0, 0], [9, 5, 5, 8, 1, 10]], np.int32)
BATCH = {"x": jnp.asarray(TOKENS[:, :-1]), "y": jnp.asarray(TOKENS[:, 1:])}


LOGITS = jax.jit(lambda m, tokens: m(tokens))
LOSS = jax.jit(loss)
LOSS_AND_GRADIENT = jax.jit(jax.value_and_grad(lambda m, batch: jnp.sum(loss(m, batch, KEY))))


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
    logits = LOGITS(MODEL, BATCH["x"])
    assert logits.shape == (3, 5, WORDS + 4)
    for sentence, tokens in zip(logits, TOKENS[:, :-1], strict=True):
        np.testing.assert_allclose(sentence, by_hand(MODEL, tokens), atol=1e-5)


def test_losses_are_of_real_targets_only():
    losses, mask = jax.jit(token_losses)(MODEL, BATCH)
    np.testing.assert_array_equal(mask, TOKENS[:, 1:] != PAD)
    per_sentence = np.asarray(losses).sum(1) / np.asarray(mask).sum(1)
    np.testing.assert_allclose(LOSS(MODEL, BATCH, KEY), per_sentence, rtol=1e-5)


def test_a_sentence_without_targets_has_loss_and_gradient_0():
    batch = jax.tree.map(jnp.zeros_like, BATCH)
    value, gradient = LOSS_AND_GRADIENT(MODEL, batch)
    assert float(value) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_longer_padding_changes_no_gradient():
    longer = jax.tree.map(lambda a: jnp.pad(a, ((0, 0), (0, 2))), BATCH)
    one, other = (LOSS_AND_GRADIENT(MODEL, b)[1] for b in (BATCH, longer))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_loss_depends_on_the_rows_that_are_read():
    rows = gather_rows(SPARSE, MODEL, BATCH)
    assert rows.embedding.shape == (5, 3, EMBEDDING)
    ours = jax.jit(SPARSE.loss)(rows, BATCH, KEY)
    np.testing.assert_allclose(ours, LOSS(MODEL, BATCH, KEY), rtol=1e-6)


def test_vectorizes_over_clients_with_models_of_their_own():
    models = [MODEL, jax.tree.map(lambda a: -a, MODEL)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *models)
    together = jax.jit(jax.vmap(lambda m: loss(m, BATCH, KEY)))(stacked)
    for losses, model in zip(together, models, strict=True):
        np.testing.assert_allclose(losses, LOSS(model, BATCH, KEY), rtol=1e-5)


def test_is_an_objective():
    data = client_data(jax.tree.map(np.asarray, BATCH), 8)
    objective = Objective(loss, sparse=SPARSE)
    mean = jax.jit(lambda m: client_loss(objective, m, data, KEY))(MODEL)
    assert float(mean) == pytest.approx(float(jnp.mean(LOSS(MODEL, BATCH, KEY))), rel=1e-6)


def test_begins_as_in_keras():
    np.testing.assert_array_equal(MODEL.bias, np.repeat([0, 1, 0, 0], HIDDEN))
    gram = MODEL.recurrent_weight @ MODEL.recurrent_weight.T
    np.testing.assert_allclose(gram, np.eye(HIDDEN), atol=1e-5)
    assert np.abs(MODEL.embedding).max() <= 0.05
