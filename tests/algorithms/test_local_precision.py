"""Local precision: its steps are the formula's, it is FedAvg without damping, and a numerator."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.objectives import Objective, client_data, layer_input
from tests.refusals import refused

SIDE = fedpa.Server(fedpa.server.sgd(1.0))
STEP = fedpa.LocalTraining(0.5, batch_size=12)  # all of a client's examples: one step
RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 6)).astype(np.float32) * np.arange(1, 7, dtype=np.float32)
CLIENT = {"x": X, "y": RNG.integers(0, 3, 12).astype(np.int32)}
THETA = {
    "w": jnp.asarray(RNG.standard_normal((6, 3)), jnp.float32),
    "b": jnp.zeros(3),
    "scale": jnp.ones(()),
}


def loss(theta, batch, key):
    x = layer_input(batch["x"], theta["w"], theta["b"])
    z = theta["scale"] * (x @ theta["w"] + theta["b"][None])
    return optax.softmax_cross_entropy_with_integer_labels(z, batch["y"])


def send(method, client=CLIENT):
    """Δ of one client."""
    algorithm = method(Objective(loss, like=client))
    message = algorithm.broadcast(algorithm.init(THETA), 0)
    (update,) = algorithm.clients.values()
    return update(message, client_data(client), (), jax.random.key(0)).result


@pytest.mark.parametrize("epsilon", [0.1, 5.0])
@pytest.mark.parametrize("block", [3, 2048])
def test_a_step_divides_the_gradient_by_the_clients_own_precision(epsilon, block):
    gradient = jax.grad(lambda theta: jnp.mean(loss(theta, CLIENT, None)))(THETA)
    rows = np.concatenate([np.ones((12, 1)), X.astype(np.float64)], axis=1)
    second = rows.T @ rows / 12
    size = -(-7 // -(-7 // block))  # of blocks of as equal a size as possible
    number = np.arange(7) // size
    second *= number[:, None] == number[None]
    bar = second * 6 / np.trace(second[1:, 1:])
    stacked = np.concatenate([gradient["b"][None], gradient["w"]])
    expected = 0.5 * np.linalg.solve(np.eye(7) + bar / epsilon, stacked)
    delta = send(fedpa.local_precision(STEP, SIDE, epsilon=epsilon, block=block))
    np.testing.assert_allclose(delta["b"], expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(delta["w"], expected[1:], rtol=1e-4, atol=1e-6)
    # What belongs to no layer has a plain step.
    np.testing.assert_allclose(delta["scale"], 0.5 * gradient["scale"], rtol=1e-5)


def test_with_a_large_epsilon_it_is_fedavg():
    local = fedpa.LocalTraining(optax.sgd(0.05, momentum=0.9), batch_size=5, epochs=3)
    one, other = (
        send(fedpa.local_precision(local, SIDE, epsilon=1e8)),
        send(fedpa.fedavg(local, SIDE)),
    )
    for name, delta in one.items():
        np.testing.assert_allclose(delta, other[name], rtol=1e-4, atol=1e-6)


def test_global_precision_divides_its_deltas():
    local = STEP._replace(optimizer=0.01)
    method = fedpa.global_precision(fedpa.local_precision(local, SIDE))
    clients = dict.fromkeys(("one", "two"), CLIENT)
    end = fedpa.fit(loss, THETA, clients, method, rounds=3, clients_per_round=2, progress=False)
    losses = [float(jnp.mean(loss(theta, CLIENT, None))) for theta in (THETA, end.params)]
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"block": 0}, "block"),
    ],
)
def test_refuses(settings, field):
    with refused(f"{field} = {settings[field]}"):
        fedpa.local_precision(STEP, SIDE, **settings)
