"""SWAG over server iterates, and ensembles of client samples."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.posterior import client_ensemble, swag_posterior
from fedpa.server.averaging import SwagState, swag
from tests.federations import least_squares_clients
from tests.refusals import refused

CLIENTS = least_squares_clients(sizes=(20, 8, 13, 30))
PARAMS = np.zeros(3, np.float32)
LOSS = fedpa.objectives.least_squares.loss


def train(averaging, rounds=30, out=None, wrap=lambda method: method):
    side = fedpa.Server(fedpa.server.sgd(0.5), averaging=averaging)
    method = wrap(fedpa.fedavg(fedpa.LocalTraining(0.05, batch_size=8, epochs=2), side))
    return fedpa.fit(
        LOSS, PARAMS, CLIENTS, method, rounds=rounds, clients_per_round=2, out=out, progress=False
    )


def test_swag_is_around_the_mean_of_the_iterates_that_is_returned():
    result = train(swag(start=10, rank=4))
    posterior = swag_posterior(result, PARAMS)
    np.testing.assert_allclose(posterior.mean, result.params, rtol=1e-5)
    double = swag_posterior(result, PARAMS, scale=4.0)
    np.testing.assert_allclose(double.sd, 2 * np.asarray(posterior.sd), rtol=1e-5)
    state = result.state.average
    spread = state.spread / float(state.members) + (state.deviations**2).sum(axis=0) / 3
    np.testing.assert_allclose(posterior.sd**2, spread / 2, rtol=1e-4)


def test_a_resumed_run_has_the_same_swag(tmp_path):
    whole = train(swag(start=4, rank=3), rounds=8)
    train(swag(start=4, rank=3), rounds=6, out=tmp_path / "a")
    resumed = train(swag(start=4, rank=3), rounds=8, out=tmp_path / "a")
    one, other = (swag_posterior(r, PARAMS).covariance() for r in (whole, resumed))
    np.testing.assert_array_equal(one, other)


def test_runs_without_swag_are_refused():
    with refused("result"):
        swag_posterior(train(fedpa.server.averaging.polyak(), rounds=2), PARAMS)
    with refused("result = 1"):
        swag_posterior(train(swag(start=2), rounds=3), PARAMS)
    state = SwagState(*(jnp.zeros(3),) * 3, jnp.zeros((2, 3)), *(jnp.asarray(5),) * 2)
    with refused("scale = 0"):
        swag_posterior(state, PARAMS, scale=0)


def ensemble(clients=CLIENTS, **options):
    settings = {"members": 3, "progress": False, "samples": 2} | options
    return client_ensemble(
        np.ones(3, np.float32),
        LOSS,
        clients,
        lambda f: fedpa.samplers.iasg(f, 0.05, batch_size=8),
        **settings,
    )


def test_members_are_samples_of_different_clients():
    found = ensemble(members=4)
    draws = np.asarray(found.density.draws)
    assert draws.shape == (4, 3)
    assert len({tuple(row) for row in draws.tolist()}) == 4
    for name, data in CLIENTS.items():
        optimum = np.linalg.lstsq(data["x"], data["y"])[0]
        nearest = np.linalg.norm(draws - optimum, axis=1).min()
        assert nearest < np.linalg.norm(np.ones(3) - optimum), name


def test_one_seed_gives_one_ensemble():
    one, same, other = (ensemble(seed=s).density.draws for s in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_clients_without_examples_are_not_drawn():
    empty = {"x": np.zeros((0, 3), np.float32), "y": np.zeros(0, np.float32)}
    with refused("members = 5"):
        ensemble(members=5, clients=CLIENTS | {"empty": empty})
    assert ensemble(members=4, clients=CLIENTS | {"empty": empty}).density.draws.shape == (4, 3)


@pytest.mark.parametrize(
    ("options", "anchor"),
    [({"members": 5}, "members = 5"), ({"members": 1}, "members = 1"), ({"samples": 0}, "samples")],
)
def test_bad_ensembles_are_refused(options, anchor):
    with refused(anchor):
        ensemble(**options)
