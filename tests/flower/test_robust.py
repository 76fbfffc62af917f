"""Robust aggregation over nodes, and weights that nodes only claim."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import jax
import jax.numpy as jnp
from flwr.app import Array

import fedpa
from fedpa.algorithms.fedopt import ClientResult
from fedpa.errors import FedpaError
from fedpa.flower.client import bound_weights
from fedpa.flower.server import correct_norms
from tests.flower.loopback_grid import capture
from tests.flower.test_loopback import assert_close, grid_of, serve, served, settings

NODES = [{"partition-id": k, "num-partitions": 5} for k in range(5)]
LYING = 105


def plain(tmp_path, name, **changes):
    config = settings(tmp_path / name, method="fedavg", clients_per_round=20, **changes)
    del config["burn-in-rounds"]
    return config


def flip(content):
    """Everything but the weight, which the server knows, with another sign and a million times."""
    for name, array in content["arrays"].items():
        value = array.numpy()
        if value.ndim:
            content["arrays"][name] = Array((-1e6 * value).astype(value.dtype))


def with_a_liar(config):
    grid = grid_of(config, NODES)
    grid.faults[LYING] = flip
    return serve(grid, config)


def distance(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(float(np.linalg.norm(a - b)) for a, b in pairs if hasattr(a, "shape"))


def test_a_node_that_lies_of_its_norms_is_found_out():
    infos = {"loss": [1.0, 2.0], "delta_norm": [0.1, 0.2]}
    assert correct_norms(infos, 0.2) == infos
    assert correct_norms(infos, 30.0) == {"loss": [1.0, 2.0], "delta_norm": [30.0, 30.0]}
    assert correct_norms({}, 30.0) == {}


@pytest.mark.filterwarnings("ignore:.*times as long as")
def test_a_node_that_lies_moves_the_mean_and_not_the_median(tmp_path):
    honest = {
        name: served(plain(tmp_path, f"{name}-honest", aggregation=name), NODES).params
        for name in ("weighted-mean", "median")
    }
    fits = {name: with_a_liar(plain(tmp_path, name, aggregation=name)) for name in honest}
    moved = {name: distance(fits[name].params, params) for name, params in honest.items()}
    # The liar's clients among the 20 of the round, and no others.
    assert 1 <= fits["median"].history[0]["train/outliers"] < 10
    assert moved["weighted-mean"] > 1e4
    assert moved["median"] < 1.0
    assert distance(honest["median"], honest["weighted-mean"]) < 1.0


def test_fewer_nodes_than_the_aggregation_needs_are_refused(tmp_path):
    config = plain(tmp_path, "few", aggregation="multi-krum:1", min_nodes=4)
    with pytest.raises(FedpaError, match=r"min-nodes = 4: .* at least 5 results"):
        served(config, NODES)


def test_weights_are_bounded_by_the_median_of_what_nodes_say(tmp_path):
    """With a bound of one example all clients weigh the same."""
    bounded, lines = capture(lambda: served(plain(tmp_path, "bounded", largest_ratio=0.001)))
    assert "largest-ratio = 0.001" in lines
    uniform = served(plain(tmp_path, "uniform", weighting="uniform"))
    assert_close(bounded.params, uniform.params)


@pytest.mark.parametrize(("n", "weight"), [(5, 5), (50, 50), (51, 50), (10_000_000, 50)])
def test_a_client_weighs_at_most_as_if_it_had_so_many_examples(n, weight):
    def client(message, data, state, key):
        return ClientResult(jnp.ones(2), data.n.astype(jnp.float32), state, ())

    server = fedpa.Server(fedpa.server.sgd(1.0))
    (bounded,) = bound_weights(fedpa.fedopt(server, client), 50).clients.values()
    data = fedpa.objectives.ClientData({"x": jnp.zeros((1, 1))}, jnp.asarray(n, jnp.int32))
    assert float(bounded(None, data, (), None).weight) == weight
