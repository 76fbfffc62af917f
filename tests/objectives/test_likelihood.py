"""A likelihood agrees with automatic differentiation of its own log-density, label by label."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedpa.experiments.models import bag_of_words, cnn, lstm, perceptron
from fedpa.objectives import Likelihood
from fedpa.objectives.layer_inputs import layers_of
from fedpa.training.problem import split_params
from tests.refusals import refused
from tests.strategies import arrays

B, T, K = 2, 3, 4
SHAPES = {"classes": (B, K), "places": (B, T, K), "tags": (B, K), "numbers": (B,)}
LINKS = {"classes": "softmax", "places": "softmax", "tags": "sigmoid", "numbers": "normal"}


def likelihood(kind):
    ignored = 0 if kind == "places" else None
    return Likelihood(lambda f, batch: f, LINKS[kind], ignored=ignored, noise=0.5)


def draw_labels(kind, rng):
    if kind in ("classes", "places"):
        return jnp.asarray(rng.integers(0, K, SHAPES[kind][:-1]), jnp.int32)
    y = rng.normal(size=SHAPES[kind])
    return jnp.asarray(y > 0 if kind == "tags" else y, jnp.float32)


kinds = pytest.mark.parametrize("kind", SHAPES)
seeds = st.integers(0, 2**32 - 1)


@kinds
@given(seed=seeds)
def test_the_curvature_is_the_hessian(kind, seed):
    rng = np.random.default_rng(seed)
    f = jnp.asarray(2 * rng.normal(size=SHAPES[kind]), jnp.float32)
    u = jnp.asarray(rng.normal(size=f.shape), jnp.float32)
    one, batch = likelihood(kind), {"y": draw_labels(kind, rng)}

    def total(f):
        return jnp.sum(one.nll(f, batch))

    wanted = jax.jvp(jax.grad(total), (f,), (u,))[1]
    np.testing.assert_allclose(one.curvature(f, u, batch), wanted, atol=1e-5)


@kinds
@given(seed=seeds)
def test_the_root_times_its_transpose_is_the_curvature(kind, seed):
    """SSᵀu = Hu, Sᵀ by the vector-Jacobian product of the linear map S."""
    rng = np.random.default_rng(seed)
    f = jnp.asarray(2 * rng.normal(size=SHAPES[kind]), jnp.float32)
    u = jnp.asarray(rng.normal(size=f.shape), jnp.float32)
    one, batch = likelihood(kind), {"y": draw_labels(kind, rng)}

    def root(v):
        return one.curvature_root(f, v, batch)

    _, transpose = jax.vjp(root, jnp.zeros_like(f))
    wanted = one.curvature(f, u, batch)
    np.testing.assert_allclose(root(*transpose(u)), wanted, atol=1e-5)


@given(arrays(B, K, dtype=np.float32), seeds)
def test_the_nll_is_scipys(f, seed):
    y = draw_labels("tags", np.random.default_rng(seed))
    p = 1 / (1 + np.exp(-f.astype(np.float64)))
    found = likelihood("tags").nll(jnp.asarray(f), {"y": y})
    wanted = -scipy.stats.bernoulli.logpmf(y, p).sum(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    found = likelihood("tags")._replace(link="normal").nll(jnp.asarray(f), {"y": y})
    wanted = -scipy.stats.norm.logpdf(y, f, 0.5).sum(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_ignored_labels_do_not_count():
    one, f = likelihood("places"), jnp.ones((B, T, K))
    none, some = ({"y": jnp.full((B, T), y, jnp.int32)} for y in (0, 1))
    assert one.nll(f, none).tolist() == [0.0, 0.0]
    assert not one.curvature(f, f, none).any()
    assert one.nll(f, some) == pytest.approx(T * np.log(K))


def test_labels_that_are_not_there_are_refused():
    with refused("field = 'y'"):
        likelihood("classes").labels({"x": jnp.ones(2)})


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("numbers", jnp.ones((B, 1))),
        ("tags", jnp.ones(B)),
        ("classes", jnp.ones((B, K), jnp.int32)),
        ("classes", jnp.ones(B)),
    ],
)
def test_labels_of_other_shapes_are_refused(kind, labels):
    """They would be broadcast to something else without a word."""
    with refused("field = 'y'"):
        likelihood(kind).nll(jnp.ones(SHAPES[kind]), {"y": labels})


@pytest.mark.parametrize(
    ("changes", "anchor"),
    [
        ({"link": "gaussian"}, "link = 'gaussian'"),
        ({"link": "normal", "noise": 0.0}, "noise = 0.0"),
        ({"link": "sigmoid", "ignored": 0}, "ignored = 0"),
    ],
)
def test_a_likelihood_that_is_none_is_refused(changes, anchor):
    with refused(anchor):
        Likelihood(lambda f, batch: f)._replace(**changes).check()


def test_the_models_outputs_have_the_probabilities_of_their_losses():
    """Each bundled model: the loss that is trained is the likelihood's, as a mean over labels."""
    key = jax.random.key(0)
    images = {"x": jnp.ones((2, 28, 28, 1)), "y": np.array([1, 0], np.int32)}
    words = np.array([[1, 2, 3], [4, 1, 0]], np.int32)
    sentences = {"x": words, "y": np.array([[2, 3, 1], [1, 0, 0]], np.int32)}
    bags = {
        "ids": words,
        "weights": np.full((2, 3), 1 / 3, np.float32),
        "y": np.eye(2, 4, dtype=np.float32),
    }
    pixels = {"x": jnp.ones((2, 64)), "y": images["y"]}
    lstm_model = lstm.NextWordLSTM(5, 3, 4, key=key)
    bag = bag_of_words.BagOfWords(5, 4, key=key)
    checks = [
        (Likelihood(lambda p, b: p(b["x"])), cnn.CNN(10, key=key), cnn.loss, images, 1),
        (
            Likelihood(lambda p, b: perceptron.logits(p, b["x"])),
            perceptron.init(key),
            perceptron.loss,
            pixels,
            1,
        ),
        (Likelihood(lstm.outputs, ignored=0), lstm_model, lstm.loss, sentences, np.array([3, 1])),
        (Likelihood(bag_of_words.outputs, "sigmoid"), bag, bag_of_words.loss, bags, 4),
    ]
    for one, model, loss, raw, labels in checks:
        batch = jax.tree.map(jnp.asarray, raw)
        no_dropout = None if loss is cnn.loss else key
        wanted = loss(model, batch, no_dropout) * np.asarray(labels, np.float32)
        np.testing.assert_allclose(one.loss(model, batch), wanted, rtol=1e-5)
        theta, assemble = split_params(model)
        found, trained = (
            layers_of(lambda theta, batch, key, f=f: f(assemble(theta), batch, key), theta, batch)
            for f in (one.loss, loss)
        )
        assert found == trained
