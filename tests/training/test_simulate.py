"""Whole runs as one program: the numbers of `fedpa.fit`, for every seed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.data import from_mapping
from fedpa.engines.machine import DoesNotFit
from fedpa.errors import NoUsableClientError
from fedpa.objectives import Objective, least_squares
from fedpa.training import simulate as module
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 40, 30, 25))
CLIENTS["empty"] = jax.tree.map(lambda array: array[:0], CLIENTS["client-0000"])
START = np.full(3, 2.0, np.float32)
LOCAL = fedpa.LocalTraining(optax.sgd(0.05), batch_size=6, epochs=4, samples=3)
SERVER = fedpa.Server(fedpa.server.sgd(0.5, 0.5))
FEDPA = fedpa.fedpa(LOCAL, SERVER, rho=0.5, burn_in_rounds=2)
METHODS = {
    "fedavg": fedpa.fedavg(LOCAL, SERVER),
    "fedpa": FEDPA,
    "scaffold": fedpa.scaffold(LOCAL, SERVER),
    "mime": fedpa.mime(LOCAL, SERVER, base=fedpa.algorithms.momentum(0.9)),
    "global_precision": fedpa.global_precision(FEDPA, every=2),
}
QUICK = ("scaffold",)


def evaluate(params):
    return {"norm": jnp.linalg.norm(params)}


def assert_equals_fit(runs, place, fit):
    for one, other in zip(jax.tree.leaves(runs.params), jax.tree.leaves(fit.params), strict=True):
        np.testing.assert_allclose(one[place], other, rtol=1e-5, atol=1e-6)
    recorded = {name for name in fit.history[0] if name.startswith(("train/", "eval/"))}
    assert recorded - {"train/rejected_clients"} <= set(runs.metrics)
    for name, values in runs.metrics.items():
        trained = [record[name] for record in fit.history]
        np.testing.assert_allclose(values[place], trained, rtol=2e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in METHODS],
)
def test_it_gives_the_numbers_of_fit(name):
    """Cohorts, keys, phases, client states, inquiries; clients of unequal sizes, one empty."""
    options = {
        "rounds": 5,
        "clients_per_round": 3,
        "evaluate": evaluate,
    }
    arguments = (least_squares.loss, START, CLIENTS, METHODS[name])
    runs = fedpa.simulate(*arguments, seeds=[8, 3], **options)
    assert runs.params.shape == (2, 3)
    assert runs.seeds == (8, 3)
    assert_equals_fit(runs, 1, fedpa.fit(*arguments, seed=3, **options))
    assert not np.allclose(runs.params[0], runs.params[1], rtol=1e-4)


def test_a_client_whose_result_is_not_finite_is_rejected_and_keeps_its_state():
    clients = {f"c{i}": {"x": np.arange(4.0) + i, "scale": np.ones(4)} for i in range(3)}
    clients["c1"]["scale"][2] = 0

    def loss(theta, batch, key):
        return (theta - batch["x"] / batch["scale"]) ** 2

    method = fedpa.scaffold(fedpa.LocalTraining(0.1, 2), SERVER)
    arguments = (loss, np.zeros(()), clients, method)
    options = {"rounds": 4, "clients_per_round": 2}
    with pytest.warns(UserWarning, match=r"seed 1: \d client updates"):
        runs = fedpa.simulate(*arguments, seeds=[1], **options)
    with pytest.warns(UserWarning, match="rejected"):
        fit = fedpa.fit(*arguments, seed=1, **options)
    assert runs.metrics["train/rejected"].sum() > 0
    assert_equals_fit(runs, 0, fit)
    clients["c0"]["scale"][0] = clients["c2"]["scale"][0] = 0
    with pytest.raises(NoUsableClientError):
        fedpa.simulate(*arguments, seeds=1, **options)


def test_a_model_has_leaves_that_are_not_trained_and_metrics_may_be_arrays():
    clients = {"a": np.arange(4.0, dtype=np.float32), "b": np.arange(6.0, dtype=np.float32)}
    params = {"w": np.zeros(2, np.float32), "degree": 2, "act": jnp.tanh}

    def loss(params, batch, key):
        return (params["act"](params["w"][0]) - params["w"][1] * batch) ** params["degree"]

    method = fedpa.fedavg(fedpa.LocalTraining(0.01, 2), SERVER)
    runs = fedpa.simulate(
        Objective(loss, regularizer=lambda params: params["w"] @ params["w"]),
        params,
        from_mapping(clients),
        method,
        rounds=3,
        clients_per_round=2,
        seeds=2,
        evaluate=lambda params: {"w": params["w"], "one": 1.0},
    )
    assert runs.params["w"].shape == (2, 2)
    assert runs.params["degree"] == 2
    assert runs.metrics["eval/w"].shape == (2, 3, 2)
    np.testing.assert_array_equal(runs.metrics["eval/w"][:, -1], runs.params["w"])
    assert "3 rounds of 2 seeds" in repr(runs)
    assert "eval/one" in repr(runs)


@pytest.mark.long
def test_a_run_vectorizes_over_learning_rates():
    clients = module.stack_federation(from_mapping(least_squares_clients(sizes=(20, 20, 20))))

    def one(seed, rate):
        side = fedpa.Server(fedpa.server.sgd(1.0), schedule=lambda t: rate)
        method = fedpa.fedpa(LOCAL, side, rho=0.5, burn_in_rounds=2)
        algorithm = method(Objective(least_squares.loss))
        start, root = jnp.asarray(START), jax.random.key(seed)
        return module.run_rounds(algorithm, start, clients, root, 4).params

    assert clients.data.n.shape == ()
    seeds, rates = jnp.array([0, 1, 0], jnp.uint32), jnp.array([0.1, 0.1, 0.2])
    together = jax.jit(jax.vmap(one))(seeds, rates)
    alone = jax.jit(one)(seeds[2], rates[2])
    np.testing.assert_allclose(together[2], alone, rtol=1e-5)
    assert not np.allclose(together[0], together[1], rtol=1e-6)


def run(**changes):
    options = {"rounds": 2, "clients_per_round": 2, "seeds": 2} | changes
    return fedpa.simulate(least_squares.loss, START, CLIENTS, METHODS["fedavg"], **options)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seeds": 0}, "seeds = 0"),
        ({"seeds": []}, r"seeds = \[\]"),
        ({"seeds": [1, -1]}, "seed = -1"),
        ({"seeds": [2**32]}, "seed = 4294967296"),
        ({"rounds": 0}, "rounds = 0"),
        ({"clients_per_round": 0}, "clients_per_round = 0"),
        ({"evaluate": lambda params: {"norm": float(params @ params)}}, "evaluate = "),
        ({"evaluate": lambda params: {"norm": np.asarray(params)}}, "evaluate = "),
        ({"evaluate": lambda params: params}, "evaluate's answer = "),
    ],
)
def test_bad_settings_are_refused(changes, field):
    with pytest.raises(fedpa.FedpaError, match=f"^{field}"):
        run(**changes)


@pytest.mark.parametrize(("free", "field"), [(100, "clients = 5"), (100_000, "seeds = 2")])
def test_what_does_not_fit_in_memory_is_refused(free, field, monkeypatch):
    monkeypatch.setattr(module, "count_free_bytes", lambda device: free)
    with pytest.raises(DoesNotFit, match=f"^{field}"):
        run(evaluate=lambda params: {"many": jnp.full(100_000, params[0])})
