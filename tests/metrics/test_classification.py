import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss

from fedpa.metrics import classifier
from tests.metrics.summing import owners, parts, values

EXAMPLES, CLASSES = 6, 4


def logits(params, x):
    """A model that has learnt every example's scores by heart."""
    return params[x]


METRIC = classifier(logits)


def case(seed):
    rng = np.random.default_rng(seed)
    params = jnp.asarray(rng.normal(size=(EXAMPLES, CLASSES)), jnp.float32)
    y = rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)
    return params, {"x": np.arange(EXAMPLES, dtype=np.int32), "y": y}


@given(st.integers(0, 999))
def test_values_are_those_of_scikit_learn(seed):
    params, batch = case(seed)
    found = values(METRIC, params, [batch])
    p = np.exp(np.asarray(params, np.float64))
    p /= p.sum(axis=1, keepdims=True)
    assert found == pytest.approx(
        {
            "loss": log_loss(batch["y"], p, labels=range(CLASSES)),
            "accuracy": accuracy_score(batch["y"], p.argmax(axis=1)),
        },
        rel=1e-5,
    )


@given(st.integers(0, 999), owners(EXAMPLES))
def test_values_are_the_same_whatever_the_batches(seed, owner):
    params, batch = case(seed)
    apart, together = (values(METRIC, params, b) for b in (parts(batch, owner), [batch]))
    assert apart == pytest.approx(together, rel=1e-6)
    assert apart["accuracy"] == together["accuracy"]


def test_nothing_has_no_values():
    found = METRIC.values({"examples": 0.0, "loss": 0.0, "right": 0.0})
    assert found.keys() == {"loss", "accuracy"}
    assert all(map(math.isnan, found.values()))
