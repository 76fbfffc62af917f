"""What a run costs is known before it: traffic, states, steps and memory are those of the run."""

import jax
import numpy as np
import optax
import pytest

import fedpa
from fedpa.engines.engine import num_bytes
from fedpa.objectives import Objective, least_squares
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 40, 30, 25))
START = np.zeros(3, np.float32)
LOCAL = fedpa.LocalTraining(optax.sgd(0.05), batch_size=6, epochs=4, samples=3)
SERVER = fedpa.Server(fedpa.server.adam(0.5))
FEDPA = fedpa.fedpa(LOCAL, SERVER, rho=0.5, burn_in_rounds=2)
METHODS = {
    "fedpa": FEDPA,
    "scaffold": fedpa.scaffold(LOCAL, SERVER),
    "mime": fedpa.mime(LOCAL, SERVER, base=fedpa.algorithms.momentum(0.9)),
    "global_precision": fedpa.global_precision(FEDPA, every=2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mime" else pytest.mark.long) for n in METHODS]
)
def test_traffic_and_states_are_those_of_the_run(name):
    arguments = (least_squares.loss, START, CLIENTS, METHODS[name])
    options = {"rounds": 5, "clients_per_round": 2}
    cost = fedpa.estimate(*arguments, **options)
    fit = fedpa.fit(*arguments, **options)
    for record in fit.history:
        phase = cost.phases[record["phase"]]
        assert record["comm/bytes_up"] == 2 * phase.bytes_up
        assert record["comm/bytes_down"] == 2 * phase.bytes_down
    phases = [record["phase"] for record in fit.history]
    assert {n: p.rounds for n, p in cost.phases.items()} == {
        n: phases.count(n) for n in cost.phases
    }
    assert (cost.clients, cost.clients_per_round) == (4, 2)
    assert (cost.parameters, cost.parameter_bytes) == (3, 12)
    assert cost.server_bytes == num_bytes(fit.state)
    assert cost.client_bytes == (12 if name == "scaffold" else 0)


def test_work_is_counted():
    """Steps by hand; operations of a step are those of X θ and Xᵀ r, twice 2bd, and a few of b."""
    dim, batch = 200, 50
    clients = {k: np.ones((n, dim), np.float32) for k, n in {"a": 60, "b": 100, "c": 0}.items()}

    def loss(theta, x, key):
        return (x @ theta) ** 2

    def cost(local):
        method = fedpa.fedavg(local, SERVER)
        found = fedpa.estimate(
            Objective(loss), np.ones(dim, np.float32), clients, method, clients_per_round=3
        )
        return found.flops_per_step, next(iter(found.phases.values()))

    step, phase = cost(fedpa.LocalTraining(0.1, batch, epochs=5))
    assert phase.local_steps == pytest.approx(5 * (2 + 2))
    assert phase.examples == pytest.approx(5 * 160)
    assert 4 * batch * dim <= step <= 4.5 * batch * dim
    assert phase.flops == pytest.approx(20 * step)
    data, theta, row = 104 * dim * 4, dim * 4, dim * 4
    assert phase.client_memory >= data + theta
    assert phase.memory >= 3 * data + 160 * row
    counted = fedpa.LocalTraining(
        0.1, batch, samples=2, steps_per_sample=3, burn_in_steps=1, discard_steps=1
    )
    _, phase = cost(counted)
    assert phase.local_steps == pytest.approx(2 * (1 + 2 * 4))
    assert phase.examples == pytest.approx(9 * 30 + 9 * 50)


def test_what_is_not_known_is_not_guessed():
    exact = fedpa.exact_posterior(least_squares.posterior, fedpa.Server(fedpa.server.sgd(1.0)))
    cost = fedpa.estimate(least_squares.loss, START, CLIENTS, exact, clients_per_round=9)
    (phase,) = cost.phases.values()
    assert cost.flops_per_step is None
    assert phase[-3:] == (None, None, None)
    assert cost.clients_per_round == 4
    table = repr(cost).splitlines()
    assert len(table) == 4
    assert table[-1].endswith("–")


def test_nothing_runs():
    """Neither an evaluation of the loss nor a client's read, but for the one that gives shapes."""
    data = fedpa.data.from_mapping(CLIENTS)
    read, computed = [], []
    lazy = data._replace(examples=lambda name: read.append(name) or data.examples(name))

    def loss(theta, batch, key):
        jax.debug.callback(lambda: computed.append(1))
        return least_squares.loss(theta, batch, key)

    fedpa.estimate(loss, START, lazy, fedpa.fedavg(LOCAL, SERVER), clients_per_round=2)
    jax.effects_barrier()
    assert not computed
    assert len(read) == 1


@pytest.mark.parametrize(
    ("changes", "field"), [({"rounds": 0}, "rounds = 0"), ({"clients_per_round": 0}, "clients_per")]
)
def test_bad_settings_are_refused(changes, field):
    options = {"clients_per_round": 1} | changes
    with pytest.raises(fedpa.FedpaError, match=f"^{field}"):
        fedpa.estimate(least_squares.loss, START, CLIENTS, FEDPA, **options)
