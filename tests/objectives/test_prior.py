"""The prior is counted once: conjugate regression, however its examples are split over clients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import fedpa
from fedpa.objectives import (
    NormalPrior,
    Objective,
    client_data,
    client_loss,
    global_posterior,
    laplace,
    least_squares,
    log_posterior,
)
from fedpa.objectives.checks import check_loss
from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.objective import minibatch_loss
from tests.refusals import refused
from tests.strategies import arrays, powers_of_two

KEY = jax.random.key(0)
CAPACITY = 32
"""One shape for all clients: few programs to compile."""
THETA = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


class Regression(NamedTuple):
    clients: list
    """(x, y) of each."""
    mean: np.ndarray
    precision: np.ndarray

    @property
    def n(self):
        return sum(len(y) for _, y in self.clients)

    def textbook(self):
        """Mean and precision of p(θ | D): noise sd 1, all examples at one place."""
        x = np.concatenate([x for x, _ in self.clients])
        y = np.concatenate([y for _, y in self.clients])
        precision = np.diag(self.precision) + x.T @ x
        return np.linalg.solve(precision, self.precision * self.mean + x.T @ y), precision

    def objective(self):
        prior = fedpa.normal_prior(self.mean, precision=self.precision)
        return Objective(least_squares.loss, prior=prior, num_examples=self.n)

    def data(self):
        return [client_data({"x": x, "y": y}, CAPACITY) for x, y in self.clients]


@st.composite
def regressions(draw, dim=3):
    """One to seven clients of one to nine examples each."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    clients = [(draw(arrays(n, dim)), draw(arrays(n))) for n in sizes]
    precision = [draw(powers_of_two(-3, 3)) for _ in range(dim)]
    return Regression(clients, draw(arrays(dim)), np.array(precision))


@given(problem=regressions())
def test_the_product_of_local_posteriors_is_the_textbook_posterior(problem):
    mean, precision = problem.textbook()
    with jax.enable_x64(True):
        objective, start = problem.objective(), jnp.zeros(3)
        local = []
        for data in problem.data():
            # A Gaussian: its precision and its pull follow from derivatives anywhere.
            gradient, hessian = derivatives(objective.prior, objective.num_examples, start, data)
            local.append((-np.asarray(hessian), np.asarray(gradient)))
    np.testing.assert_allclose(sum(p for p, _ in local), precision, rtol=1e-6, atol=1e-6)
    together = np.linalg.solve(sum(p for p, _ in local), sum(pull for _, pull in local))
    np.testing.assert_allclose(together, mean, rtol=1e-6, atol=1e-6)
    # Client i holds p₀ to the power of n_i/n.
    for (p, _), (x, y) in zip(local, problem.clients, strict=True):
        share = len(y) / problem.n * np.diag(problem.precision)
        np.testing.assert_allclose(p, x.T @ x + share, rtol=1e-6, atol=1e-6)


@jax.jit
def derivatives(prior, n, theta, data):
    objective = Objective(least_squares.loss, prior=prior, num_examples=n)

    def log_density(theta):
        return log_posterior(objective, theta, data, 1.0, KEY)

    return jax.grad(log_density)(theta), jax.hessian(log_density)(theta)


@given(problem=regressions())
@pytest.mark.long
def test_the_minimum_of_the_federated_mean_loss_is_the_textbook_mean(problem):
    mean, precision = problem.textbook()
    with jax.enable_x64(True):
        objective = problem.objective()
        quadratics = []
        for data in problem.data():
            local = laplace(objective, data, jnp.zeros(3), KEY)
            pull = jax.grad(client_loss, 1)(objective, jnp.zeros(3), data, KEY)
            mode = jnp.linalg.solve(local.hessian, -pull)
            quadratics.append(local._replace(mean=mode))
        product = global_posterior(quadratics)
        np.testing.assert_allclose(product.mean, mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(product.hessian * product.n, precision, rtol=1e-6, atol=1e-6)


def test_a_regularizer_counts_for_every_example_and_a_prior_once():
    """The example of the docstring: sd 2 asked with 100 examples gives 0.2."""
    data = client_data({"x": np.zeros((100, 1), np.float32), "y": np.zeros(100, np.float32)})
    theta, precision = jnp.zeros(1), 1 / 2.0**2

    def sd_of(objective):
        hessian = jax.hessian(log_posterior, 1)(objective, theta, data, 1.0, KEY)
        return float(-hessian[0, 0]) ** -0.5

    loss = least_squares.loss
    assert sd_of(Objective(loss, lambda p: precision / 2 * jnp.sum(p**2))) == pytest.approx(0.2)
    prior = fedpa.normal_prior(sd=2.0)
    assert sd_of(Objective(loss, prior=prior, num_examples=100)) == pytest.approx(2.0)
    # A quarter of all examples: a quarter of the prior's precision.
    assert sd_of(Objective(loss, prior=prior, num_examples=400)) == pytest.approx(4.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, lambda batch: batch["w"]], ids=["plain", "weighted"])
def test_a_step_has_the_share_of_its_examples(reduction, weight):
    """Mean: f̂ − log p/n; sum: that times the batch's size, so that directions agree."""
    prior = fedpa.normal_prior(1.0, sd=0.5)
    objective = Objective(
        lambda theta, batch, key: theta * batch["x"],
        reduction=reduction,
        weight=weight,
        prior=prior,
        num_examples=8,
    )
    examples = {"x": jnp.asarray([1.0, 2.0, 9.0]), "w": jnp.asarray([3.0, 1.0, 5.0])}
    batch = Minibatch(examples, jnp.asarray([1.0, 1.0, 0.0]))
    theta = jnp.asarray(2.0)  # −log p(θ) = ½ · 4 · (2 − 1)² = 2
    total, size = (6.0, 2.0) if weight is None else (10.0, 4.0)
    expected = total + size * 2 / 8
    if reduction == "mean":
        expected /= size
    assert float(minibatch_loss(objective, theta, batch, KEY)) == pytest.approx(expected)


def test_natural_parameters_are_in_the_order_of_the_ravelled_parameters():
    prior = fedpa.normal_prior(
        {"w": np.arange(3.0), "b": -1.0}, precision={"w": np.array([[1.0], [2.0]]), "b": 3.0}
    )
    eta, precision = prior.natural(THETA)
    full = {
        "w": jnp.asarray([[1.0, 1, 1], [2, 2, 2]]),
        "b": jnp.full(3, 3.0),
    }
    means = {"w": jnp.tile(jnp.arange(3.0), (2, 1)), "b": jnp.full(3, -1.0)}
    np.testing.assert_array_equal(precision, ravel_pytree(full)[0])
    np.testing.assert_array_equal(eta, precision * ravel_pytree(means)[0])
    flat, _ = ravel_pytree(THETA)
    mean = ravel_pytree(means)[0]
    expected = -0.5 * jnp.sum(precision * (flat - mean) ** 2)
    np.testing.assert_allclose(prior.log_density(THETA), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "wide"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_numbers_are_in_the_accumulation_dtype(dtype, wide):
    with jax.enable_x64(dtype == "float64"):
        theta = {"w": jnp.ones((40, 10), dtype), "b": jnp.ones(3, dtype)}
        prior = fedpa.normal_prior(np.float64(0.0), sd=1)
        assert prior.log_density(theta).dtype == wide
        assert float(prior.log_density(theta)) == -0.5 * 403
        assert {vector.dtype.name for vector in prior.natural(theta)} == {wide}


def test_a_flat_prior_is_improper_and_adds_nothing():
    assert fedpa.normal_prior(sd=2.0).is_proper
    flat = fedpa.normal_prior(5.0, precision={"w": 0, "b": np.zeros(3)})
    assert not flat.is_proper
    flat.check(THETA)
    assert float(flat.log_density(THETA)) == 0
    assert not fedpa.normal_prior(precision={"w": 1.0, "b": 0.0}).is_proper


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "sd = None"),
        ({"sd": 2.0, "precision": 0.25}, "precision = 0.25"),
        ({"sd": 0}, "sd = 0.0"),
        ({"sd": -1.5}, "sd = -1.5"),
        ({"sd": np.inf}, "sd = inf"),
        ({"sd": 1e-200}, "sd = 1e-200"),
        ({"sd": "2"}, "sd = '2'"),
        ({"sd": True}, "sd = True"),
        ({"sd": {"w": np.array([1.0, -2.0])}}, "sd['w'][1] = -2.0"),
        ({"precision": -1.0}, "precision = -1.0"),
        ({"precision": {"b": np.nan}}, "precision['b'] = nan"),
        ({"mean": np.nan, "sd": 1.0}, "mean = nan"),
        ({"mean": {"b": np.array([0, np.inf])}, "sd": 1.0}, "mean['b'][1] = inf"),
        ({"mean": "0", "sd": 1.0}, "mean = '0'"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, field):
    with refused(field):
        fedpa.normal_prior(**arguments)


@pytest.mark.parametrize(
    ("prior", "anchors"),
    [
        (NormalPrior(0.0, {"w": 1.0}), ("prior.precision", "['b']")),
        (NormalPrior(np.zeros(3), 1.0), ("prior.mean", "['b']")),
        (NormalPrior({"w": np.zeros(2), "b": 0.0}, 1.0), ("prior.mean['w']", "(2,)", "(2, 3)")),
        (NormalPrior(0.0, {"w": 1.0, "b": np.ones((1, 3))}), ("prior.precision['b']", "(1, 3)")),
        (NormalPrior(0.0, {"w": 1.0, "b": -np.ones(3)}), ("prior.precision['b'][0] = -1.0",)),
        (NormalPrior(0.0, 1e39), ("prior.precision = 1e+39",)),
        (NormalPrior(0.0, {"w": "1", "b": 0}), ("prior.precision['w'] = '1'",)),
        (NormalPrior({"w": np.nan, "b": 0}, 1.0), ("prior.mean['w'] = nan",)),
        (2.0, ("prior = 2.0",)),
    ],
)  # fmt: skip
def test_a_prior_that_does_not_fit_the_parameters_is_refused(prior, anchors):
    objective = Objective(lambda p, b, k: b["x"] * p["b"][0], prior=prior, num_examples=4)
    with refused(*anchors):
        check_loss(objective, THETA, {"x": jnp.ones(4)})


def test_a_density_that_is_not_one_number_is_refused():
    class PerLeaf:
        def log_density(self, theta):
            return theta["b"]

    objective = Objective(lambda p, b, k: b["x"] * p["b"][0], prior=PerLeaf(), num_examples=4)
    with refused("prior.log_density", "(3,)"):
        check_loss(objective, THETA, {"x": jnp.ones(4)})


def test_a_prior_needs_the_number_of_all_examples():
    objective = Objective(least_squares.loss, prior=fedpa.normal_prior(sd=1.0))
    data = client_data({"x": np.eye(2), "y": np.ones(2)})
    with refused("num_examples = None"):
        client_loss(objective, jnp.zeros(2), data, KEY)


def test_a_number_of_examples_must_be_positive():
    prior = fedpa.normal_prior(sd=1.0)
    objective = Objective(least_squares.loss, prior=prior, num_examples=0)
    with refused("num_examples = 0"):
        check_loss(objective, jnp.zeros(2), {"x": jnp.eye(2), "y": jnp.ones(2)})
