import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.algorithms.local_training import local_work
from fedpa.experiments.hyperparameters import Hyperparameters, resolve_hyperparameters
from fedpa.experiments.methods import METHODS, label_method
from fedpa.objectives import Objective, client_data, least_squares
from fedpa.samplers import Epochs, Steps, exact
from tests.refusals import refused

BASE = LocalTraining(optax.sgd(0.1), batch_size=5, epochs=5)


@pytest.mark.parametrize(
    ("changes", "window", "samples"),
    [
        ({}, Epochs(0), 5),  # M epochs give M samples
        ({"samples": 4}, Epochs(1), 4),
        ({"burn_in_epochs": 1}, Epochs(1), 4),
        ({"burn_in_epochs": 2, "samples": 3}, Epochs(2), 3),
        ({"steps_per_sample": 10, "samples": 7}, Steps(10), 7),
        (
            {"steps_per_sample": 10, "samples": 7, "burn_in_steps": 100, "discard_steps": 2},
            Steps(10, 100, 2),
            7,
        ),
    ],
)
def test_what_makes_a_sample(changes, window, samples):
    work = local_work(BASE._replace(**changes))
    assert work.window == window
    assert work.samples == samples


@pytest.mark.parametrize(
    ("changes", "anchor"),
    [
        ({"samples": 0}, "samples = 0"),
        ({"epochs": 1.5}, "epochs = 1.5"),
        ({"batch_size": 5.0}, "batch_size = 5.0"),
        ({"order": "shuffled"}, "order = 'shuffled'"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd'"),
        ({"optimizer": -0.1}, "optimizer = -0.1"),
        ({"samples": 6}, "samples = 6"),
        ({"samples": 5, "burn_in_epochs": 1}, "samples = 5"),
        ({"burn_in_epochs": 5}, "burn_in_epochs = 5"),
        ({"epochs": 0}, "epochs = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"burn_in_steps": 3}, "burn_in_steps = 3"),
        ({"discard_steps": 3}, "discard_steps = 3"),
        ({"steps_per_sample": 3}, "samples = None"),
        ({"steps_per_sample": 0, "samples": 2}, "steps_per_sample = 0"),
        ({"steps_per_sample": 3, "samples": 2, "burn_in_steps": -1}, "burn_in_steps = -1"),
        ({"steps_per_sample": 3, "samples": 2, "burn_in_epochs": 1}, "burn_in_epochs = 1"),
    ],
)
def test_contradictions_are_refused(changes, anchor):
    with refused(anchor):
        local_work(BASE._replace(**changes))


@pytest.mark.parametrize(
    ("changes", "anchor"),
    [
        ({"rho": -1.0}, "rho = -1.0"),
        ({"rho": float("nan")}, "rho = nan"),
        ({"client_learning_rate": 0.0}, "client_learning_rate = 0.0"),
        ({"server_learning_rate": float("inf")}, "server_learning_rate = inf"),
        ({"server_momentum": 1.0}, "server_momentum = 1.0"),
        ({"server_optimizer": "adam", "server_momentum": 0.9}, "server_momentum = 0.9"),
        ({"burn_in_rounds": -1}, "burn_in_rounds = -1"),
        ({"client_schedule": "cosine"}, "client_schedule = 'cosine'"),
        ({"server_schedule": "cosine"}, "server_schedule = 'cosine'"),
        ({"sample_scale": -2.0}, "sample_scale = -2.0"),
        ({"iterate_averaging": "swa"}, "iterate_averaging = 'swa'"),
        ({"delta_form": "recurrence", "shrinkage": "oas"}, "delta_form = 'recurrence'"),
        ({"client_optimizer": "adam", "client_momentum": 0.9}, "client_momentum = 0.9"),
        ({"server_tau": -1.0}, "server_tau = -1.0"),
        ({"samples": 99}, "samples = 99"),
    ],
)
def test_bad_hyperparameters_are_refused(changes, anchor):
    with refused(anchor):
        resolve_hyperparameters(dataclasses.replace(Hyperparameters(), **changes))


def test_resolving_fills_in_the_samples():
    assert resolve_hyperparameters(Hyperparameters(epochs=7)).samples == 7
    assert resolve_hyperparameters(Hyperparameters(epochs=7, burn_in_epochs=2)).samples == 5


def test_a_sampler_with_a_temperature_gets_one_that_fedpa_can_use():
    assert resolve_hyperparameters(Hyperparameters()).temperature is None
    for name in ("hmc", "nuts", "sghmc", "sgld"):
        assert resolve_hyperparameters(Hyperparameters(sampler=name)).temperature == 0.01
        assert (
            resolve_hyperparameters(Hyperparameters(sampler=name, temperature="n")).temperature
            == "n"
        )


@pytest.mark.long
def test_fedpa_scales_samples_by_their_samplers_temperature():
    """Of itself as `sqrt-n` does at T = 1."""
    data = client_data({"x": np.ones((9, 2), np.float32), "y": np.arange(9, dtype=np.float32)})

    def delta(**options):
        method = fedpa.fedpa(BASE, Server(server.sgd(1.0)), rho=1.0, **options)
        algorithm = method(Objective(least_squares.loss))
        message = algorithm.broadcast(algorithm.init(jnp.zeros(2)), 0)
        return algorithm.clients["sampling"](message, data, (), jax.random.key(0)).result

    bayes = {"sampler": lambda objective, _: exact(least_squares.posterior, 1.0)}
    np.testing.assert_allclose(delta(**bayes), delta(**bayes, sample_scale="sqrt-n"), rtol=1e-5)
    assert np.abs(delta(**bayes) - delta(**bayes, sample_scale="none")).max() > 1e-3
    np.testing.assert_array_equal(delta(), delta(sample_scale="none"))  # IASG, as in the paper


def test_one_sample_has_no_covariance_and_says_so():
    one = BASE._replace(samples=1)
    for rho in (0.1, "oas"):
        with pytest.warns(UserWarning, match="samples = 1: "):
            fedpa.fedpa(one, Server(server.sgd(1.0)), rho=rho)
    with pytest.warns(UserWarning, match="samples = 1: "):
        METHODS["fedpa"].build(Hyperparameters(epochs=1))
    fedpa.mean_control(one, Server(server.sgd(1.0)))


def test_methods_are_found_and_build():
    known = {"centralized", "fedavg-1", "fedavg", "fedpa", "mb-sgd", "mean", "mean-scaled"}
    assert known < set(METHODS)
    for method in METHODS.values():
        for optimizer in ("sgd", "adam", "adagrad", "yogi"):
            method.build(method.adjust(Hyperparameters(server_optimizer=optimizer)))
        once = method.adjust(Hyperparameters())
        assert resolve_hyperparameters(method.adjust(once)) == resolve_hyperparameters(once)


def test_fedavg_1_says_what_it_runs():
    h = METHODS["fedavg-1"].adjust(Hyperparameters(epochs=5, samples=2))
    assert resolve_hyperparameters(h).epochs == 1
    assert resolve_hyperparameters(h).samples == 1


def test_the_control_of_a_data_driven_rho_is_refused():
    """Its step length is that of a fixed ρ: beside OAS it would control for something else."""
    with refused("shrinkage = 'oas, identity'"):
        METHODS["mean-scaled"].build(Hyperparameters(shrinkage="oas"))


def test_labels():
    assert label_method("fedpa", Hyperparameters(epochs=7)) == "FedPA[7]"
    by_steps = Hyperparameters(samples=3, steps_per_sample=10)
    assert label_method("fedpa", by_steps) == "FedPA[3×10 steps]"


@pytest.mark.parametrize("rho", [-0.1, float("nan"), None])
def test_a_bad_rho_is_refused_before_any_work(rho):
    side = Server(server.sgd(1.0))
    with refused(f"rho = {rho}"):
        fedpa.fedpa(BASE, side, rho=rho)
    with refused(f"rho = {rho}"):
        fedpa.mean_control(BASE, side, rho=rho)
    with refused("burn_in_rounds = -1"):
        fedpa.fedpa(BASE, side, rho=0.1, burn_in_rounds=-1)
