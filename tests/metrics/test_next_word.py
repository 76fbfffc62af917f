import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.experiments.models import NextWordLSTM
from fedpa.metrics import next_words
from tests.experiments.models.token_losses import token_losses
from tests.metrics.summing import owners, parts, sums, values
from tests.strategies import labels

WORDS, EXAMPLES, LENGTH = 3, 3, 4
IDS = WORDS + 4
OOV, BEGIN, END = 4, 5, 6

METRIC = next_words(WORDS, lambda params, x: params[x[:, 0]])


@st.composite
def cases(draw):
    """A model that has learnt the scores of every sentence by heart; many are equally high."""
    params = jnp.asarray(draw(labels(5, EXAMPLES, LENGTH, IDS)) - 2, jnp.float32)
    lengths = draw(labels(LENGTH + 1, EXAMPLES))[:, None]
    y = np.where(np.arange(LENGTH) < lengths, 1 + draw(labels(IDS - 1, EXAMPLES, LENGTH)), 0)
    x = np.repeat(np.arange(EXAMPLES)[:, None], LENGTH, axis=1)
    return params, {"x": x.astype(np.int32), "y": y.astype(np.int32)}


def plain(params, y):
    """Target by target."""
    scores = np.asarray(params, np.float64)
    losses, right = [], []
    for example, place in np.ndindex(y.shape):
        z, target = scores[example, place], y[example, place]
        if target != 0:
            losses.append(np.log(np.exp(z).sum()) - z[target])
        if target not in (0, OOV, BEGIN, END):
            right.append(z.argmax() == target)
    loss = np.mean(losses) if losses else math.nan
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": np.mean(right) if right else math.nan,
    }


@given(cases())
def test_values_are_means_over_targets(case):
    params, batch = case
    found = values(METRIC, params, [batch])
    assert found == pytest.approx(plain(params, batch["y"]), rel=1e-5, nan_ok=True)


@given(cases(), owners(EXAMPLES))
def test_values_are_the_same_whatever_the_batches(case, owner):
    params, batch = case
    apart, together = (values(METRIC, params, b) for b in (parts(batch, owner), [batch]))
    assert apart == pytest.approx(together, rel=1e-6, nan_ok=True)
    assert apart["accuracy"] == pytest.approx(together["accuracy"], rel=0, abs=0, nan_ok=True)


def scores_of(guesses):
    return 9 * jax.nn.one_hot(jnp.array([guesses]), IDS)


@pytest.mark.parametrize(
    ("targets", "guesses", "accuracy"),
    [
        ([1, 2, END, 0], [1, 3, END, 0], 1 / 2),
        ([OOV, 2, END, 0], [OOV, 2, 1, 0], 1),
        ([OOV, 2, END, 0], [OOV, OOV, END, 0], 0),
        ([OOV, END, 0, 0], [OOV, END, 0, 0], math.nan),
    ],
)
def test_accuracy_by_hand(targets, guesses, accuracy):
    batch = {"x": np.zeros((1, 4), np.int32), "y": np.array([targets], np.int32)}
    found = values(METRIC, scores_of(guesses), [batch])
    assert found["accuracy"] == pytest.approx(accuracy, nan_ok=True)


@pytest.mark.parametrize("where", [slice(None), 0, 2, 6])
def test_no_guess_is_right_where_scores_are_no_numbers(where):
    batch = {"x": np.zeros((1, 4), np.int32), "y": np.full((1, 4), 2, np.int32)}
    scores = scores_of([2, 2, 2, 2]).at[..., where].set(jnp.nan)
    assert values(METRIC, scores, [batch])["accuracy"] == 0


def test_a_diverged_model_has_infinite_perplexity():
    found = METRIC.values({"targets": 1.0, "loss": 1e4, "words": 1.0, "right": 0.0})
    assert found == {"loss": 1e4, "perplexity": math.inf, "accuracy": 0}
    nothing = METRIC.values({"targets": 0.0, "loss": 0.0, "words": 0.0, "right": 0.0})
    assert all(map(math.isnan, nothing.values()))


def test_the_loss_is_the_models():
    model = NextWordLSTM(WORDS, embedding=3, hidden=4, key=jax.random.key(0))
    y = np.array([[2, 3, END, 0], [OOV, 1, 1, END], [0, 0, 0, 0]], np.int32)
    batch = {"x": np.roll(y, 1, axis=1), "y": y}
    each, _ = sums(next_words(WORDS), model, [batch])
    losses, mask = jax.jit(token_losses)(model, batch)
    assert each["loss"] == pytest.approx(float(losses.sum()), rel=1e-5)
    assert each["targets"] == int(mask.sum())
