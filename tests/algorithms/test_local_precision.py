"""Local precision: its steps are the formula's, it is FedAvg without damping, and a numerator."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.methods import METHODS
from fedpa.experiments.models import bag_of_words
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


OBJECTIVE = Objective(loss, like=CLIENT)


def send(method, client=CLIENT, objective=OBJECTIVE, theta=THETA):
    """Δ of one client."""
    algorithm = method(objective)
    message = algorithm.broadcast(algorithm.init(theta), 0)
    (update,) = algorithm.clients.values()
    return update(message, client_data(client), (), jax.random.key(0)).result


@pytest.mark.parametrize(("epsilon", "block"), [(0.1, 3), (5.0, 2048)])
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
    delta = send(fedpa.local_precision(STEP, SIDE, local_epsilon=epsilon, local_block=block))
    np.testing.assert_allclose(delta["b"], expected[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(delta["w"], expected[1:], rtol=1e-4, atol=1e-6)
    # What belongs to no layer has a plain step.
    np.testing.assert_allclose(delta["scale"], 0.5 * gradient["scale"], rtol=1e-5)


@pytest.mark.long
def test_words_and_tags():
    """A table with a bias: a diagonal factor, in units of the words' mean square."""
    model = bag_of_words.BagOfWords(5, 3, key=jax.random.key(0))
    batch = {
        "ids": jnp.array([[0, 1], [1, 2], [3, 0]]),
        "weights": jnp.array([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]),
        "y": jnp.eye(3),
    }
    gradient = jax.grad(lambda theta: jnp.mean(bag_of_words.loss(theta, batch, jax.random.key(0))))(
        model
    )
    bags = np.array([[0.5, 0.5, 0, 0, 0], [0, 0.25, 0.75, 0, 0], [0, 0, 0, 1, 0]])
    squares = np.mean(bags**2, axis=0)
    gain = 1 / (1 + np.concatenate([[1.0], squares]) / squares.mean() / 2.0)
    objective = Objective(bag_of_words.loss, sparse=bag_of_words.SPARSE)
    delta = send(fedpa.local_precision(STEP, SIDE, local_epsilon=2.0), batch, objective, model)
    np.testing.assert_allclose(delta.bias, 0.5 * gain[0] * gradient.bias, rtol=1e-4)
    np.testing.assert_allclose(delta.weight, 0.5 * gain[1:, None] * gradient.weight, rtol=1e-4)


def test_an_empty_client_moves_nothing():
    delta = send(fedpa.local_precision(STEP, SIDE), {key: a[:0] for key, a in CLIENT.items()})
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(delta))


@pytest.mark.long
def test_clients_side_by_side_are_as_one_by_one():
    local = fedpa.LocalTraining(0.02, batch_size=5, epochs=2)
    algorithm = fedpa.local_precision(local, SIDE)(Objective(loss, like=CLIENT))
    message = algorithm.broadcast(algorithm.init(THETA), 0)
    (update,) = algorithm.clients.values()
    each = [{**CLIENT, "x": CLIENT["x"] * scale} for scale in (1.0, 0.5)]
    keys = jax.random.split(jax.random.key(0))
    alone = [
        update(message, client_data(one), (), key).result
        for one, key in zip(each, keys, strict=True)
    ]
    data = jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(client_data, each))
    together = jax.vmap(lambda d, key: update(message, d, (), key).result)(data, keys)
    for k, one in enumerate(alone):
        for name, delta in one.items():
            np.testing.assert_allclose(together[name][k], delta, rtol=1e-3, atol=1e-5)


def test_with_a_large_epsilon_it_is_fedavg():
    local = fedpa.LocalTraining(optax.sgd(0.05, momentum=0.9), batch_size=5, epochs=3)
    one, other = (
        send(fedpa.local_precision(local, SIDE, local_epsilon=1e8)),
        send(fedpa.fedavg(local, SIDE)),
    )
    for name, delta in one.items():
        np.testing.assert_allclose(delta, other[name], rtol=1e-4, atol=1e-6)


def test_global_precision_divides_its_deltas():
    """Both halves: D = ε(Ā + εI)⁻¹ of the locally divided delta, A of the only client."""
    inner = fedpa.local_precision(STEP, SIDE)
    method = fedpa.global_precision(inner, epsilon=0.5, decay=0.0, length=None, rank="exact")
    settings = {"rounds": 1, "clients_per_round": 1, "progress": False}
    end = fedpa.fit(loss, THETA, {"one": CLIENT}, method, **settings).params
    delta = send(inner)
    rows = np.concatenate([np.ones((12, 1)), X.astype(np.float64)], axis=1)
    bar = rows.T @ rows * 6 / np.trace(X.T @ X)
    stacked = np.concatenate([delta["b"][None], delta["w"]])
    step = 0.5 * np.linalg.solve(bar + 0.5 * np.eye(7), stacked)
    np.testing.assert_allclose(THETA["w"] - end["w"], step[1:], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(THETA["b"] - end["b"], step[0], rtol=1e-3, atol=1e-5)


def test_settings_of_both_halves_are_told_apart():
    inner = fedpa.local_precision(STEP, SIDE, local_epsilon=0.1)
    settings = fedpa.global_precision(inner, epsilon=2.0).settings()
    assert (settings["local_epsilon"], settings["epsilon"]) == (0.1, 2.0)


def test_the_command_builds_it_and_refuses_its_setting_elsewhere():
    method = METHODS["local-precision"]
    assert method.adjust(Hyperparameters()).local_epsilon == 5.0
    with refused("local_epsilon = 0.0"):
        method.build(Hyperparameters(local_epsilon=0.0))
    both = METHODS["global-precision"]
    assert callable(both.build(both.adjust(Hyperparameters(numerator="local-precision"))))
    config = default_config("digits", "global-precision")
    given = dataclasses.replace(config.hyperparameters, local_epsilon=3.0)
    with refused("local_epsilon = 3.0"):
        resolve(dataclasses.replace(config, hyperparameters=given))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"local_epsilon": 0.0}, "local_epsilon"),
        ({"local_epsilon": None}, "local_epsilon"),
        ({"local_block": 0}, "local_block"),
    ],
)
def test_refuses(settings, field):
    with refused(f"{field} = {settings[field]}"):
        fedpa.local_precision(STEP, SIDE, **settings)
