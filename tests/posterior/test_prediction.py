"""Prediction: textbook answers where there are some, Monte Carlo against linearized, refusals."""

import importlib.util
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.posterior import Posterior, estimate_noise, prediction
from fedpa.posterior.posterior import split_model
from fedpa.precisions import Dense, Diagonal
from fedpa.precisions.gaussian import Gaussian
from tests.refusals import refused
from tests.strategies import arrays

KEY = jax.random.key(0)


def linear(w, x):
    return x @ w


def conjugate(x, y, noise=0.5, sd=2.0):
    """The textbook posterior of a linear regression: mean, covariance, and as a `Posterior`."""
    precision = x.T @ x / noise**2 + np.eye(x.shape[1]) / sd**2
    eta = x.T @ y / noise**2
    gaussian = Gaussian(jnp.asarray(eta, jnp.float32), Dense(jnp.asarray(precision, jnp.float32)))
    covariance = np.linalg.inv(precision)
    return covariance @ eta, covariance, Posterior(gaussian, np.zeros(x.shape[1], np.float32))


def regression(seed=0, n=30, d=3, noise=0.5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return x, x @ rng.normal(size=d) + noise * rng.normal(size=n)


def make(mean, covariance, model=None):
    precision = np.linalg.inv(np.asarray(covariance, np.float64))
    eta = precision @ mean
    gaussian = Gaussian(jnp.asarray(eta, jnp.float32), Dense(jnp.asarray(precision, jnp.float32)))
    return Posterior(gaussian, np.zeros(len(eta), np.float32) if model is None else model)


def binary(mean, sd):
    """A single logit that is N(mean, sd²), for each of the examples alike."""
    return make([mean], [[sd**2]])


def logit(w, x):
    return x[:, 0] * w[0]


ONE = np.ones((1, 1), np.float32)


def integrate(function, mean, sd):
    """E of a function of N(mean, sd²), by a fine grid."""
    t = np.linspace(-9, 9, 20_001)
    weights = np.exp(-0.5 * t**2)
    return (function(mean + sd * t) * weights).sum() / weights.sum()


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


# Regression


@given(arrays(6, 3), arrays(6), arrays(4, 3))
def test_linearized_is_the_textbook_predictive(x, y, new):
    mean, covariance, posterior = conjugate(x, y)
    found = posterior.predict(linear, new.astype(np.float32), linearized=True, noise=0.5)
    scale = 1 + np.abs(new).max() * (1 + np.abs(mean).max())
    variance = np.einsum("ij,jk,ik->i", new, covariance, new)
    np.testing.assert_allclose(found.mean, new @ mean, atol=1e-4 * scale)
    np.testing.assert_allclose(found.sd, np.sqrt(variance), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.observation_sd, np.sqrt(variance + 0.25), rtol=1e-3)
    for level, steps in ((0.95, 1.959964), (0.5, 0.674490)):
        lower, upper = found.observation_interval(level)
        np.testing.assert_allclose(upper - lower, 2 * steps * found.observation_sd, rtol=1e-4)
        np.testing.assert_allclose((upper + lower) / 2, found.mean, atol=1e-4 * scale)


def test_draws_of_a_linear_function_agree_with_the_textbook():
    x, y = regression()
    mean, covariance, posterior = conjugate(x, y)
    new = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    draws = 20_000
    found = posterior.predict(linear, new, KEY, draws=draws, noise=0.5)
    sd = np.sqrt(np.einsum("ij,jk,ik->i", new, covariance, new))
    error = sd / math.sqrt(draws)
    assert np.all(np.abs(found.mean - new @ mean) < 4 * error)
    np.testing.assert_allclose(found.sd, sd, rtol=4 / math.sqrt(2 * draws))
    # A quantile's standard error is √(p(1 − p)/S) over the density there.
    lower, upper = found.interval(0.95)
    tail = 4 * math.sqrt(0.025 * 0.975 / draws) / 0.0584
    assert np.all(np.abs(lower - (new @ mean - 1.96 * sd)) < tail * sd)
    assert np.all(np.abs(upper - (new @ mean + 1.96 * sd)) < tail * sd)
    total = np.sqrt(sd**2 + 0.25)
    np.testing.assert_allclose(found.observation_sd, total, rtol=0.02)
    assert np.all(np.abs(found.observation_interval(0.95).upper - new @ mean - 1.96 * total) < tail)


def test_draws_are_those_of_sample():
    *_, posterior = conjugate(*regression())
    new = np.eye(3, dtype=np.float32)
    found = posterior.predict(linear, new, KEY, draws=50)
    samples = np.asarray(posterior.sample(KEY, 50))
    np.testing.assert_allclose(found.mean, samples.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.sd, samples.std(axis=0, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(
        found.interval(0.8), np.quantile(samples, [0.1, 0.9], axis=0), rtol=1e-4
    )


@pytest.mark.parametrize("options", [{"linearized": True}, {"key": KEY}])
def test_intervals_cover_as_often_as_they_say(options):
    """2,000 regressions through 0 of their own: slope from the prior, data and new data from it."""
    rng = np.random.default_rng(5)
    count, noise, sd = 2000, 0.5, 2.0
    slopes, x, new = (
        sd * rng.normal(size=count),
        rng.normal(size=(count, 4)),
        rng.normal(size=count),
    )
    y = x * slopes[:, None] + noise * rng.normal(size=(count, 4))
    precision = (x**2).sum(axis=1) / noise**2 + 1 / sd**2
    eta = (x * y).sum(axis=1) / noise**2
    gaussian = Gaussian(
        *jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (eta, Diagonal(precision)))
    )
    found = Posterior(gaussian, np.zeros(count, np.float32)).predict(
        lambda w, batch: w[batch["row"]] * batch["x"],
        {"row": np.arange(count, dtype=np.int32), "x": new.astype(np.float32)},
        noise=noise,
        **options,
    )
    truth = slopes * new
    for level in (0.5, 0.95):
        allowed = 4 * math.sqrt(level * (1 - level) / count)
        for values, interval in (
            (truth, found.interval(level)),
            (truth + noise * rng.normal(size=count), found.observation_interval(level)),
        ):
            inside = np.mean((interval.lower < values) & (values < interval.upper))
            assert abs(inside - level) < allowed, (level, inside)


def test_noise_of_the_model():
    """σ = exp(s) with s ~ N(0, 0.3²): E σ² = exp(2 · 0.09) by draws, σ at the mean linearized."""
    posterior = make([1.0, 0.0], np.diag([0.04, 0.09]), {"mu": np.zeros(()), "s": np.zeros(())})

    def level(params, x):
        return params["mu"] + 0 * x

    def noise(params):
        return jnp.exp(params["s"])

    x = np.zeros(3, np.float32)
    found = posterior.predict(level, x, KEY, draws=20_000, noise=noise)
    np.testing.assert_allclose(found.observation_sd**2, 0.04 + math.exp(0.18), rtol=0.03)
    straight = posterior.predict(level, x, linearized=True, noise=noise)
    np.testing.assert_allclose(straight.observation_sd**2, 1.04, rtol=1e-5)


@pytest.mark.parametrize("prior", [None, fedpa.normal_prior(sd=2.0)])
def test_noise_is_estimated_from_sums_over_clients(prior):
    x, y = regression(n=40)
    mean, covariance, posterior = conjugate(x, y, sd=1e6 if prior is None else 2.0)
    clients = {
        name: {"x": x[rows].astype(np.float32), "y": y[rows].astype(np.float32)}
        for name, rows in (("a", slice(0, 7)), ("b", slice(7, 8)), ("c", slice(8, 40)))
    }
    found = estimate_noise(posterior, lambda w, b: b["y"] - b["x"] @ w, clients, prior=prior)
    effective = 3 - (0 if prior is None else np.trace(covariance) / 4)
    assert found == pytest.approx(math.sqrt(((y - x @ mean) ** 2).sum() / (40 - effective)), 1e-4)


# Classification


@given(st.floats(-4, 4), st.floats(0.1, 4))
def test_probit_is_close_to_the_integral(mean, sd):
    posterior = binary(mean, sd)
    found = posterior.predict(logit, ONE, kind="logits", linearized=True)
    exact = integrate(sigmoid, mean, sd)
    assert found.mean[0] == pytest.approx(exact, abs=0.01)
    square = integrate(lambda z: (sigmoid(z) - exact) ** 2, mean, sd)
    assert found.sd[0] == pytest.approx(math.sqrt(square), rel=0.01)
    ends = [sigmoid(mean - 1.959964 * sd), sigmoid(mean + 1.959964 * sd)]
    np.testing.assert_allclose(np.ravel(found.interval(0.95)), ends, rtol=1e-3)


def test_draws_of_a_logit_are_the_integral():
    found = binary(1.0, 2.0).predict(logit, ONE, KEY, kind="logits", draws=20_000)
    exact = integrate(sigmoid, 1.0, 2.0)
    assert found.mean[0] == pytest.approx(exact, abs=4 * float(found.sd[0]) / math.sqrt(20_000))
    by_class = binary(1.0, 2.0).predict(
        lambda w, x: jax.nn.sigmoid(logit(w, x)), ONE, KEY, kind="probabilities", draws=20_000
    )
    np.testing.assert_allclose(by_class.mean, found.mean, rtol=1e-5)


def two_logits(w, x):
    """What both have in common does not matter, nor that it varies."""
    return jnp.stack([3 * w[0] * x[:, 0], 4 * w[0] * x[:, 0]], axis=1)


def three_logits(w, x):
    return x @ w.reshape(2, 3)


@given(st.floats(-3, 3), st.floats(0.1, 3))
def test_two_classes_are_one_logit(mean, sd):
    posterior = binary(mean, sd)
    for options in ({"linearized": True}, {"key": KEY, "draws": 50}):
        one = posterior.predict(logit, ONE, kind="logits", **options)
        two = posterior.predict(two_logits, ONE, kind="logits", **options)
        np.testing.assert_allclose(two.mean[:, 1], one.mean, rtol=1e-4)
        np.testing.assert_allclose(two.mean.sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(two.sd[:, 0], one.sd, rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(two.interval(0.9).upper[:, 1], one.interval(0.9).upper, 1e-3)


def predict_three_classes(spread, draws):
    rng = np.random.default_rng(2)
    root = rng.normal(size=(6, 6))
    posterior = make(rng.normal(size=6), spread**2 * (root @ root.T + 0.5 * np.eye(6)))
    x = rng.normal(size=(20, 2)).astype(np.float32)
    straight = posterior.predict(three_logits, x, kind="logits", linearized=True)
    drawn = posterior.predict(three_logits, x, KEY, kind="logits", draws=draws)
    for found in (straight, drawn):
        np.testing.assert_allclose(found.mean.sum(axis=1), 1, rtol=1e-5)
    return straight, drawn


def test_three_classes_with_little_spread():
    """Errors of linearizing, in sds, are in proportion to the spread; here less than the draws'."""
    straight, drawn = predict_three_classes(spread=0.01, draws=5000)
    assert np.all(np.abs(straight.mean - drawn.mean) < 0.1 * drawn.sd)
    np.testing.assert_allclose(straight.sd, drawn.sd, rtol=0.06)
    for level in (0.5, 0.95):
        for mine, other in zip(straight.interval(level), drawn.interval(level), strict=True):
            assert np.all(np.abs(mine - other) < 0.2 * drawn.sd)


def test_three_classes_with_much_spread():
    """Logits with an sd of about 1: logits scaled each by its own variance are off by 0.07."""
    straight, drawn = predict_three_classes(spread=0.3, draws=5000)
    np.testing.assert_allclose(straight.mean, drawn.mean, atol=0.05)


def test_no_spread_is_the_prediction_at_the_mean():
    mean = np.arange(6.0) / 3
    posterior = make(mean, 1e-10 * np.eye(6))
    x = np.array([[1.0, -1.0], [0.5, 2.0]], np.float32)
    wanted = jax.nn.softmax(three_logits(jnp.asarray(mean, jnp.float32), x))
    for options in ({"linearized": True}, {"key": KEY, "draws": 20}):
        found = posterior.predict(three_logits, x, kind="logits", **options)
        np.testing.assert_allclose(found.mean, wanted, atol=1e-4)
        assert np.all(found.sd < 1e-4)


# Models, streams, printing


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear
    activation: callable
    classes: int

    def __call__(self, x):
        return self.out(self.activation(self.hidden(x)))


def apply(net, x):
    return jax.vmap(net)(x["pixels"])[:, : net.classes]


def network():
    keys = jax.random.split(KEY)
    net = Net(eqx.nn.Linear(3, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1]), jax.nn.tanh, 2)
    theta = eqx.filter(net, eqx.is_inexact_array)
    mean = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(theta)])
    return Posterior(Gaussian(400 * mean, Diagonal(jnp.full(len(mean), 400.0))), net)


PIXELS = {"pixels": np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)}


def test_modules_and_trees_of_examples():
    """A small net with little spread: linearized is close to the draws, and to the net itself."""
    posterior = network()
    straight = posterior.predict(apply, PIXELS, linearized=True, noise=0.5)
    drawn = posterior.predict(apply, PIXELS, KEY, noise=0.5)
    np.testing.assert_allclose(straight.mean, apply(posterior.mean, PIXELS), rtol=1e-4)
    np.testing.assert_allclose(drawn.mean, straight.mean, atol=0.03)
    np.testing.assert_allclose(drawn.sd, straight.sd, rtol=0.15)


@pytest.mark.parametrize("options", [{"linearized": True}, {"key": KEY}])
def test_streamed_is_unstreamed(options):
    posterior = network()
    whole = posterior.predict(apply, PIXELS, noise=0.5, **options)
    parts = posterior.predict(apply, PIXELS, noise=0.5, batch_size=3, **options)
    assert whole.mean.shape == parts.mean.shape == (7, 2)
    for one, other in zip(jax.tree.leaves(whole[1:]), jax.tree.leaves(parts[1:]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_large_jacobians_come_in_smaller_batches(monkeypatch):
    posterior = network()
    whole = posterior.predict(apply, PIXELS, linearized=True)
    linearize, shapes = prediction._linearize, []

    def watch(f, gaussian, theta, rest, batch):
        shapes.append(batch["pixels"].shape)
        return linearize(f, gaussian, theta, rest, batch)

    monkeypatch.setattr(prediction, "_linearize", watch)
    monkeypatch.setattr(prediction, "BUDGET", 3 * 2 * len(posterior.density.eta))
    parts = posterior.predict(apply, PIXELS, linearized=True)
    assert shapes == [(3, 3)] * 3
    np.testing.assert_allclose(parts.sd, whole.sd, rtol=1e-5)


def test_printed_it_is_a_table():
    posterior = binary(1.0, 0.5)
    x = np.ones((12, 1), np.float32)
    lines = repr(posterior.predict(logit, x, linearized=True, noise=1.0)).splitlines()
    assert len(lines) == 12
    assert "12 examples" in lines[0]
    assert "2 more" in lines[-1]
    assert "1 ± 0.5" in lines[1]
    classes = repr(posterior.predict(two_logits, x[:2], kind="logits", linearized=True))
    assert "class 1" in classes.splitlines()[1]


# Refusals


@pytest.mark.parametrize(
    ("options", "anchors"),
    [
        ({"kind": "classes"}, ["kind = 'classes'"]),
        ({"kind": "probabilities", "linearized": True}, ["kind = 'probabilities'"]),
        ({"draws": 1}, ["draws = 1"]),
        ({"batch_size": 0}, ["batch_size = 0"]),
        ({"key": None}, ["key = None"]),
        ({"noise": -1.0}, ["noise = -1.0"]),
        ({"noise": 1.0, "kind": "logits"}, ["noise = 1.0"]),
        ({"noise": lambda params: -jnp.ones(())}, ["noise = -1.0"]),
        ({"noise": lambda params: params}, ["noise", "shape (1,"]),
        ({"levels": 0.9}, ["levels = 0.9"]),
        ({"levels": (0.5, 95)}, ["levels[1] = 95"]),
        ({"f": 3}, ["f = 3"]),
        ({"f": lambda w: w}, ["f"]),
        ({"f": lambda w, x: x.sum()}, ["f", "shape ("]),
        ({"f": lambda w, x: x[:1]}, ["f", "shape (1, 1"]),
        ({"f": lambda w, x: x[:, 0] > 0}, ["f", "type bool"]),
        ({"f": lambda w, x: x, "kind": "logits"}, ["f", "shape (2, 1"]),
        ({"f": lambda w, x: 3 * x[:, 0], "kind": "probabilities"}, ["f", "3.", "x[0"]),
        ({"f": lambda w, x: jnp.tile(x, 2), "kind": "probabilities"}, ["f", "1. 1.", "x[0"]),
        ({"x": np.ones((0, 1), np.float32)}, ["x"]),
        ({"x": {"a": np.ones(2), "b": np.ones(3)}}, ["x", "(2,), (3,"]),
        ({"x": np.array([[np.nan]])}, ["x", "nan"]),
    ],
)
def test_what_does_not_fit_is_refused(options, anchors):
    """By the function behind the method, whose own types the suite checks."""
    given = {"f": logit, "x": np.ones((2, 1), np.float32), "key": KEY, **options}
    f, x, key = (given.pop(name) for name in ("f", "x", "key"))
    posterior, plain = binary(0.0, 1.0), prediction.Settings("mean", 10, False, None, (0.9,), 128)
    with refused(*anchors):
        prediction.predict(
            posterior.density, split_model(posterior.model), f, x, key, plain._replace(**given)
        )


def test_a_posterior_that_is_no_density_predicts_nothing():
    improper = Posterior(Gaussian(jnp.zeros(1), Diagonal(jnp.zeros(1))), np.zeros(1, np.float32))
    with refused("posterior"):
        improper.predict(logit, ONE, linearized=True)


def test_intervals_that_were_not_kept_are_refused():
    found = binary(0.0, 1.0).predict(logit, ONE, linearized=True, levels=(0.9,))
    with refused("level = 0.95", "0.9"):
        found.interval(0.95)
    with refused("noise"):
        found.observation_interval(0.9)


def test_noise_needs_residuals_and_more_examples_than_parameters():
    *_, posterior = conjugate(*regression())
    clients = {"a": {"x": np.ones((3, 3), np.float32), "y": np.ones(3, np.float32)}}
    with refused("residuals", "shape ("):
        estimate_noise(posterior, lambda w, b: (b["y"] - b["x"] @ w).sum(), clients)
    with refused("clients", "3 examples", "3 parameters"):
        estimate_noise(posterior, lambda w, b: b["y"] - b["x"] @ w, clients)
    with refused("posterior = 1"):
        estimate_noise(1, lambda w, b: b["y"] - b["x"] @ w, clients)


# ArviZ

HAS_ARVIZ = importlib.util.find_spec("arviz") is not None


@pytest.mark.skipif(not HAS_ARVIZ, reason="arviz is not installed")
def test_draws_go_to_arviz():
    mean = np.array([1.0, 2.0, 3.0])
    model = {"w": np.zeros(2, np.float32), "b": np.zeros((), np.float32)}
    data = make(mean, np.eye(3), model).to_arviz(KEY, draws=500, chains=2)
    assert data.posterior["w"].shape == (2, 500, 2)
    assert data.posterior["b"].dims == ("chain", "draw")
    assert data.posterior.attrs["inference_library"] == "fedpa"
    samples = make(mean, np.eye(3), model).sample(KEY, 1000)
    np.testing.assert_array_equal(data.posterior["b"].values.ravel(), samples["b"])


def test_without_arviz_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    with refused("arviz", "fedpa[arviz"):
        binary(0.0, 1.0).to_arviz(KEY)
