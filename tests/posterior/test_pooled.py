"""The posterior against NUTS on the pooled data: agreement and disagreement are found."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.posterior import Posterior
from fedpa.posterior.pooled import ParameterComparison, PooledComparison
from fedpa.precisions import Dense
from fedpa.precisions.gaussian import Gaussian
from fedpa.samplers import diagnostics
from tests.refusals import refused

PRIOR = fedpa.normal_prior(1.0, sd=2.0)
MODEL = {"b": np.zeros((), np.float32), "w": np.zeros(2, np.float32)}


IMPROPER = Gaussian(jnp.zeros(3), Dense(jnp.zeros((3, 3))))


def log_likelihood(params, batch):
    """Linear regression with noise 0.5."""
    error = batch["y"] - batch["x"] @ params["w"] - params["b"]
    return -0.5 * (error / 0.5) ** 2


def federation():
    rng = np.random.default_rng(0)
    clients = {}
    for name, n in (("a", 5), ("b", 12), ("c", 3)):
        x = rng.normal(size=(n, 2)).astype(np.float32)
        y = x @ np.array([1.0, -2.0]) + 0.3 + 0.5 * rng.normal(size=n)
        clients[name] = {"x": x, "y": y.astype(np.float32)}
    return clients


def textbook(shift=0.0, scale=1.0):
    """The exact posterior, its means moved by `shift` of their sds and its sds scaled."""
    clients = federation().values()
    x = np.concatenate([np.insert(c["x"], 0, 1, axis=1) for c in clients]).astype(np.float64)
    y = np.concatenate([c["y"] for c in clients])
    precision = x.T @ x / 0.25 + np.eye(3) / 4
    mean = np.linalg.solve(precision, x.T @ y / 0.25 + 1.0 / 4)
    mean = mean + shift * np.sqrt(np.diag(np.linalg.inv(precision)))
    precision = precision / scale**2
    eta = jnp.asarray(precision @ mean, jnp.float32)
    return Posterior(Gaussian(eta, Dense(jnp.asarray(precision, jnp.float32))), MODEL)


@pytest.fixture(scope="module")
def exact():
    return fedpa.compare_with_pooled(textbook(), log_likelihood, federation(), prior=PRIOR)


def test_the_exact_posterior_agrees_up_to_the_draws_error(exact):
    assert [row.name for row in exact.rows] == ["b", "w[0]", "w[1]"]
    assert exact.rhat < 1.01
    assert exact.ess > 2000
    assert exact.divergences == 0
    assert exact.mean_error < 4 / np.sqrt(exact.ess)
    assert exact.sd_error < 4 / np.sqrt(2 * exact.ess)
    mean, sd = textbook().density.mean, textbook().density.sd
    np.testing.assert_allclose([row.mean for row in exact.rows], mean, rtol=1e-5)
    np.testing.assert_allclose([row.sd for row in exact.rows], sd, rtol=1e-5)


def test_a_wrong_posterior_disagrees_and_its_prior_counts(monkeypatch):
    """Against a flat prior, so that NUTS's means are those of least squares.

    Chains are warned of by the rule of `judge`, which asks for more here.
    """
    monkeypatch.setattr(diagnostics, "LEAST_ESS", 10**9)
    wrong, clients = textbook(shift=0.5, scale=0.7), federation().values()
    with pytest.warns(UserWarning, match="ESS"):
        found = fedpa.compare_with_pooled(wrong, log_likelihood, federation())
    x = np.concatenate([np.insert(c["x"], 0, 1, axis=1) for c in clients]).astype(np.float64)
    y = np.concatenate([c["y"] for c in clients]).astype(np.float64)
    covariance = 0.25 * np.linalg.inv(x.T @ x)
    mean, sd = covariance @ x.T @ y / 0.25, np.sqrt(np.diag(covariance))
    for place, row in enumerate(found.rows):
        assert abs(row.pooled_mean - mean[place]) < 4 * sd[place] / np.sqrt(found.ess)
        assert row.pooled_sd == pytest.approx(sd[place], rel=4 / np.sqrt(2 * found.ess))
        assert row.difference == pytest.approx((row.mean - mean[place]) / sd[place], abs=0.1)
        assert row.sd_ratio == pytest.approx(0.7, abs=0.05)
    assert found.mean_error > 0.4
    assert found.sd_error > 0.25


def test_printed_it_is_a_table_with_what_it_says(exact):
    lines = repr(exact).splitlines()
    assert len(lines) == 5
    assert lines[2].startswith("w[0]")
    row = ParameterComparison("w", 1.1, 0.24, 1.0, 0.25)
    *_, sentence = repr(PooledComparison((row,), 1.0, 10_000.0, 0)).splitlines()
    assert "within 0.40 sd" in sentence
    assert "within 4 %" in sentence
    assert "0.01 sd and 1 %" in sentence
    *_, reason = repr(PooledComparison((row,), 1.3, 10_000.0, 0)).splitlines()
    assert "R̂ = 1.300" in reason


@pytest.mark.parametrize(
    ("options", "anchors"),
    [
        ({"posterior": 1}, ["posterior = 1"]),
        ({"posterior": textbook()._replace(density=IMPROPER)}, ["posterior"]),
        ({"log_likelihood": lambda params, batch: batch["y"].sum()}, ["log_likelihood", "shape ("]),
        ({"prior": 2.0}, ["prior = 2.0"]),
        ({"prior": fedpa.normal_prior(sd={"v": 1.0})}, ["prior.precision"]),
        ({"chains": 1}, ["chains = 1"]),
        ({"draws": 3}, ["draws = 3"]),
        ({"burn_in": 0}, ["burn_in = 0"]),
        ({"seed": -1}, ["seed = -1"]),
    ],
)
def test_what_does_not_fit_is_refused(options, anchors):
    given = {"posterior": textbook(), "log_likelihood": log_likelihood, **options}
    with refused(*anchors):
        fedpa.compare_with_pooled(clients=federation(), **given)
