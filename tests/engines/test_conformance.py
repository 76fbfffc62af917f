"""What every engine must do. A new engine joins by being in its package."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.data import from_mapping
from fedpa.engines import EngineOptions, engines
from fedpa.objectives import Objective, least_squares
from tests.algorithms.scaffold import scaffold
from tests.federations import least_squares_federation, trees_equal

CLIENTS, _, _ = least_squares_federation(sizes=(7, 3, 5))
LOCAL = LocalTraining(optax.sgd(0.05), batch_size=3, epochs=2)
SIDE = Server(server.sgd(0.5, 0.9))
METHODS = {
    "fedavg": fedpa.fedavg(LOCAL, SIDE),
    "fedpa": fedpa.fedpa(LOCAL, SIDE, rho=0.5, burn_in_rounds=1),
    "scaffold": scaffold(steps=2, client_rate=0.05, server_rate=1.0, population=3),
}


def train(engine, method):
    return fedpa.train(
        METHODS[method](Objective(least_squares.loss)),
        jnp.ones(3),
        from_mapping(CLIENTS),
        rounds=2,
        clients_per_round=2,
        engine=engines()[engine](EngineOptions()),
    )


@pytest.fixture(scope="module", name="reference")
def _reference():
    return {method: train("local", method) for method in METHODS}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", engines())
def test_same_server_state(engine, method, reference):
    """To the rounding of float32: engines may sum in another order."""
    fit = train(engine, method)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
        fit.state,
        reference[method].state,
    )
    for one, other in zip(fit.history, reference[method].history, strict=True):
        assert one["phase"] == other["phase"]
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bit_reproducible(method, reference):
    assert trees_equal(train("local", method).state, reference[method].state)
