"""A problem and a method of one's own over nodes, by the library alone: `make_run`, `make_node`."""

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import jax
import jax.numpy as jnp
import optax
from flwr.app import Context, RecordDict

import fedpa
from fedpa.data.federated import from_mapping
from fedpa.flower import client_app, make_node, make_run, server_app
from fedpa.metrics.classification import classifier
from fedpa.training.problem import Problem
from tests.flower.loopback_grid import LoopbackGrid

FEW = {"min-nodes": 2, "start-timeout": 60.0, "poll": 0.01, "rounds": 3}
HALVES = [{"clients": "a,c"}, {"clients": "b,d"}]
LOCAL = fedpa.LocalTraining(optimizer=optax.sgd(0.1), batch_size=5, epochs=2)
METHODS = {
    "fedpa": fedpa.fedpa(LOCAL, fedpa.Server(optax.sgd(1.0)), rho=0.1, burn_in_rounds=1),
    "scaffold": fedpa.scaffold(LOCAL, fedpa.Server(optax.sgd(1.0), weighting="uniform")),
}


def logits(params, x):
    return x @ params["w"] + params["b"][None, :]


def loss(params, batch, key):
    scores = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])


def init(key):
    return {"w": 0.01 * jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}


def examples(seed, n):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n).astype(np.int32)
    return {"x": (rng.normal(size=(n, 4)) + 2 * np.eye(4)[y]).astype(np.float32), "y": y}


CLIENTS = from_mapping({name: examples(k, 10 + 2 * k) for k, name in enumerate("abcd")})
TEST = from_mapping({"test": examples(9, 50)})
PROBLEM = Problem(CLIENTS, init, loss, classifier(logits), TEST)
PRIOR = fedpa.normal_prior(sd=0.1)
"""So narrow that a prior counted by a node's own examples gives other parameters."""


@pytest.mark.filterwarnings("ignore:a client takes part")
@pytest.mark.parametrize(
    ("method", "prior"), [("fedpa", PRIOR), pytest.param("scaffold", None, marks=pytest.mark.long)]
)
def test_rounds_over_nodes_are_those_of_fit(tmp_path, method, prior):
    """Interrupted after two rounds and resumed; a finished run is returned as it is.

    A prior counts once for all nodes' clients together, of which a node knows its own only.
    """
    method, problem, loads = METHODS[method], PROBLEM._replace(prior=prior), []

    def load_run(settings):
        return make_run(
            problem, method, rounds=settings["rounds"], clients_per_round=3, seed=1, eval_every=3
        )

    node = make_node(problem, method)  # of all in this process: they share what is compiled

    def load_node(settings, holding):
        loads.append((settings["rounds"], holding))
        return node

    out, app = tmp_path / "run", client_app(load_node)
    nodes = [half | {"state-dir": str(tmp_path / half["clients"])} for half in HALVES]
    for rounds in (2, 3, 3):
        settings = {**FEW, "rounds": rounds, "out": str(out)}
        grid = LoopbackGrid(app, settings, nodes)
        server_app(load_run)(grid, Context(1, 1, {}, RecordDict(), settings))
    assert {message.metadata.message_type for message in grid.sent} == {"query"}
    assert len(loads) == len(set(loads))  # not for every message
    fit = fedpa.fit(
        loss,
        init(jax.random.key(1)),
        CLIENTS,
        method,
        rounds=3,
        clients_per_round=3,
        seed=1,
        prior=prior,
        engine=fedpa.engines.per_client(),  # compiles fastest
    )
    found = fedpa.load(out, params=init(jax.random.key(0)))
    for name, array in fit.params.items():
        np.testing.assert_allclose(found.params[name], array, atol=1e-5)
    assert [record["phase"] for record in found.metrics] == [r["phase"] for r in fit.history]
    assert [record["train/rejected"] for record in found.metrics] == [0, 0, 0]
    assert found.metrics[-1]["eval/accuracy"] > 0.4
    assert found.config["engine"] == "flower"


PICKLED = """
import ray.cloudpickle as cloudpickle
from fedpa.experiments.flower import client_app
cloudpickle.loads(cloudpickle.dumps(client_app()))
"""


def test_an_app_can_be_sent_to_the_processes_of_the_simulation():
    """Ray pickles it; a cache inside of it could not be. (Nor can types that tests check.)"""
    pytest.importorskip("ray", reason="the simulation needs Ray")
    subprocess.run([sys.executable, "-c", PICKLED], check=True, timeout=120)
