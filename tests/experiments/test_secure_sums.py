"""`fedpa methods` says of each method whether its messages add up: what its algorithm computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.algorithms.secure_sums import has_secure_sums
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.methods import METHODS, build_method
from fedpa.experiments.tasks.task import task_named
from fedpa.objectives import least_squares
from fedpa.server import Aggregate, Aggregation
from fedpa.training.problem import prepare


@pytest.fixture(scope="module", name="problem")
def _problem():
    return task_named("digits").load(default_config("digits", "fedavg").task_options)


def adds_up(problem, name, **changes):
    config = default_config("digits", name)
    h = dataclasses.replace(config.hyperparameters, **changes)
    h = resolve(dataclasses.replace(config, hyperparameters=h)).hyperparameters
    params = problem.init(jax.random.key(0))
    prepared = prepare(problem.objective, params, problem.clients, build_method(name, h), None)
    examples = problem.clients.examples(problem.clients.ids[0])
    return has_secure_sums(prepared.algorithm, prepared.theta, examples)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_listed_is_what_the_algorithm_does(problem, name):
    said = METHODS[name].secure_sums
    assert adds_up(problem, name) == (said == "yes")
    if said.startswith("only with --precision-rank "):
        assert adds_up(problem, name, precision_rank=said.split()[-1])


def test_a_median_does_not_add_up():
    def keep_largest(total, result, weight):
        return Aggregate(jax.tree.map(np.maximum, total.mean, result), total.weight), True

    mean = fedpa.server.weighted_mean()
    largest = Aggregation(mean.init, keep_largest, mean.merge, lambda total: total)
    local = fedpa.LocalTraining(0.1, 2)
    for aggregation, expected in ((mean, True), (largest, False)):
        side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=aggregation)
        algorithm = fedpa.fedavg(local, side)(fedpa.Objective(least_squares.loss))
        examples = {"x": np.zeros((2, 3), np.float32), "y": np.zeros(2, np.float32)}
        assert has_secure_sums(algorithm, jnp.zeros(3), examples) is expected
