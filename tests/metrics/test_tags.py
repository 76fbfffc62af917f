import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import f1_score, log_loss, precision_score, recall_score

from fedpa.experiments.models import BagOfWords
from fedpa.experiments.models.bag_of_words import loss
from fedpa.metrics import tagger
from tests.metrics.summing import owners, parts, sums, values

EXAMPLES, TAGS = 5, 8
METRIC = tagger(lambda params, batch: batch["z"])


@st.composite
def cases(draw):
    """Scores with ties and zeros among them; examples without tags, tags without examples."""
    scores = draw(st.sampled_from([st.integers(-3, 0), st.integers(-3, 4)]))
    tags = draw(st.sampled_from([st.just(0), st.integers(0, 1), st.just(1)]))
    z, y = (
        draw(hnp.arrays(dtype, (EXAMPLES, TAGS), elements=elements, fill=st.nothing()))
        for dtype, elements in ((np.float32, scores.map(float)), (np.uint8, tags))
    )
    return {"z": z, "y": y}


def recall_at(most, z, y):
    """By sorting: the lower id first among equals."""
    ranked = np.argsort(-z, axis=1, kind="stable")[:, :most]
    return np.take_along_axis(y, ranked, axis=1).sum() / y.sum() if y.any() else math.nan


@given(cases())
def test_values_are_those_of_scikit_learn(batch):
    z, y = batch["z"], batch["y"]
    given_ = (z > 0).astype(np.uint8)
    found = values(METRIC, None, [batch])
    expected = {
        "precision": precision_score(y, given_, average="micro", zero_division=0),
        "recall": recall_score(y, given_, average="micro", zero_division=np.nan),
        "recall_at_5": recall_at(5, z, y),
        "micro_f1": f1_score(y, given_, average="micro", zero_division=0),
        "macro_f1": f1_score(y, given_, average="macro", zero_division=0),
        "loss": log_loss(y.ravel(), 1 / (1 + np.exp(-z.ravel().astype(float))), labels=[0, 1]),
    }
    assert found == pytest.approx(expected, rel=1e-5, nan_ok=True)


@given(cases(), owners(EXAMPLES))
def test_values_are_the_same_whatever_the_batches(batch, owner):
    (apart, vectors_apart), (together, vectors_together) = (
        sums(METRIC, None, b) for b in (parts(batch, owner), [batch])
    )
    assert apart.pop("loss") == pytest.approx(together.pop("loss"), rel=1e-6)
    assert apart == together
    for name, vector in vectors_together.items():
        np.testing.assert_array_equal(vectors_apart[name], vector)


@given(cases())
def test_sums_are_those_over_tags(batch):
    each, vectors = sums(METRIC, None, [batch])
    for name, vector in vectors.items():
        assert each[name] == vector.sum()


def test_of_equal_scores_the_lower_id_is_higher():
    y = np.zeros((1, TAGS), np.uint8)
    y[0, 4:6] = 1
    found = values(METRIC, None, [{"z": np.zeros((1, TAGS), np.float32), "y": y}])
    assert found["recall_at_5"] == 1 / 2
    assert found["precision"] == found["recall"] == 0  # a probability of 1/2 gives no tag


def test_fewer_than_five_tags():
    y = np.array([[1, 0]], np.uint8)
    found = values(METRIC, None, [{"z": np.zeros((1, 2), np.float32), "y": y}])
    assert found["recall_at_5"] == 1


def test_nothing_has_no_values():
    names = ["examples", "loss", "among_highest", "true", "given", "right"]
    assert all(map(math.isnan, METRIC.values(dict.fromkeys(names, 0.0)).values()))


def test_the_loss_is_the_models():
    model = BagOfWords(6, TAGS, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    batch = {
        "ids": rng.integers(0, 6, (EXAMPLES, 3)).astype(np.int32),
        "weights": np.full((EXAMPLES, 3), 1 / 3, np.float32),
        "y": (rng.random((EXAMPLES, TAGS)) < 0.3).astype(np.uint8),
    }
    losses = jax.jit(loss)(model, batch, jax.random.key(0))
    assert values(tagger(), model, [batch])["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
