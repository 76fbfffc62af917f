"""Whole runs as one program: the numbers of `fedpa.train`, vectorized or not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.data import from_mapping
from fedpa.experiments.studies.simulation import equal_clients, simulate
from fedpa.objectives import Objective, least_squares
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 20, 20))
LOCAL = LocalTraining(optax.sgd(0.05), batch_size=6, epochs=4, samples=3)
START = jnp.full(3, 2.0)


def method(rate):
    side = Server(server.sgd(1.0), schedule=lambda t: rate)
    return fedpa.fedpa(LOCAL, side, rho=0.5, burn_in_rounds=2)(Objective(least_squares.loss))


@pytest.mark.long
def test_it_gives_the_numbers_of_train_across_the_switch():
    seen = []
    fit = fedpa.train(
        method(0.1),
        START,
        from_mapping(CLIENTS),
        rounds=5,
        clients_per_round=3,
        seed=4,
        callbacks=[lambda e: seen.append(np.asarray(e.params))],
    )
    clients = equal_clients(CLIENTS)
    path = jax.jit(lambda: simulate(method(0.1), START, clients, jax.random.key(4), 5))()
    np.testing.assert_allclose(path.theta, seen, rtol=1e-5)
    for name in ("loss", "delta_norm", "correction_cosine", "rho"):
        trained = [record[f"train/{name}"] for record in fit.history]
        np.testing.assert_allclose(getattr(path.infos, name), trained, rtol=1e-4, err_msg=name)


@pytest.mark.long
def test_it_vectorizes_over_seeds_and_rates():
    clients = equal_clients(CLIENTS)

    def one(seed, rate):
        return simulate(method(rate), START, clients, jax.random.key(seed), 4).theta

    seeds, rates = jnp.array([0, 1, 0], jnp.uint32), jnp.array([0.1, 0.1, 0.2])
    together = jax.jit(jax.vmap(one))(seeds, rates)
    alone = jax.jit(one)(seeds[2], rates[2])
    np.testing.assert_allclose(together[2], alone, rtol=1e-5)
    assert not np.allclose(together[0], together[1], rtol=1e-6)


def test_unequal_clients_are_refused():
    unequal = least_squares_clients(sizes=(20, 10))
    with pytest.raises(fedpa.FedpaError, match="must have equally many"):
        equal_clients(unequal)
