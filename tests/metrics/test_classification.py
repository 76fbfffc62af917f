import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from sklearn.metrics import accuracy_score, log_loss

from fedpa.metrics import classifier
from tests.metrics.summing import owners, parts, values
from tests.strategies import arrays, labels

EXAMPLES, CLASSES = 6, 4


def logits(params, x):
    """A model that has learnt every example's scores by heart."""
    return params[x]


METRIC = classifier(logits)


SCORES = arrays(EXAMPLES, CLASSES, dtype=np.float32)
LABELS = labels(CLASSES, EXAMPLES)


def of_all(y):
    return {"x": np.arange(EXAMPLES, dtype=np.int32), "y": y}


@given(SCORES, LABELS)
def test_values_are_those_of_scikit_learn(scores, y):
    """The loss to the rounding of log Σ exp and of a score, each at most 6."""
    found = values(METRIC, jnp.asarray(scores), [of_all(y)])
    p = np.exp(scores.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    loss = log_loss(y, p, labels=range(CLASSES))
    assert found["loss"] == pytest.approx(loss, abs=24 * float(np.finfo(np.float32).eps))
    assert found["accuracy"] == pytest.approx(accuracy_score(y, scores.argmax(axis=1)))


@given(SCORES, LABELS, owners(EXAMPLES))
def test_values_are_the_same_whatever_the_batches(scores, y, owner):
    params, batch = jnp.asarray(scores), of_all(y)
    apart, together = (values(METRIC, params, b) for b in (parts(batch, owner), [batch]))
    assert apart == pytest.approx(together, rel=1e-6)
    assert apart["accuracy"] == together["accuracy"]


def test_nothing_has_no_values():
    found = METRIC.values({"examples": 0.0, "loss": 0.0, "right": 0.0})
    assert found.keys() == {"loss", "accuracy"}
    assert all(map(math.isnan, found.values()))
