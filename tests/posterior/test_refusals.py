"""What `fedpa.infer` refuses, in one line that names the field and its value."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.precisions import Diagonal
from fedpa.precisions.gaussian import Gaussian
from tests.posterior import conjugate
from tests.posterior.conjugate import PRIOR
from tests.refusals import refused

X, Y = conjugate.make_examples()
CLIENTS = conjugate.split(X, Y, (8, 20, 5, 7))


def infer(log_likelihood=conjugate.log_likelihood, params=np.zeros(3, np.float32), **options):
    settings = {"clients": CLIENTS, "prior": PRIOR, "inner": "laplace", "progress": False} | options
    return fedpa.infer(log_likelihood, params, settings.pop("clients"), **settings)


@pytest.mark.parametrize(
    ("options", "anchors"),
    [
        ({"method": "gibbs"}, ["method = 'gibbs'"]),
        ({"inner": "gibbs"}, ["inner = 'gibbs'"]),
        ({"inner": 3}, ["inner = 3"]),
        ({"method": "laplace", "inner": "nuts"}, ["inner = 'nuts'"]),
        ({"method": "pvi", "inner": "nuts"}, ["inner = 'nuts'"]),
        ({"structure": "banded"}, ["structure = 'banded'"]),
        ({"damping": 0.0}, ["damping = 0.0"]),
        ({"damping": 1.5}, ["damping = 1.5"]),
        ({"damping": True}, ["damping = True"]),
        ({"tolerance": 0.0}, ["tolerance = 0.0"]),
        ({"tolerance": float("nan")}, ["tolerance = nan"]),
        ({"tolerance": "small"}, ["tolerance = 'small'"]),
        ({"rounds": 0}, ["rounds = 0"]),
        ({"rounds": 10}, ["rounds = 10", "method='laplace'"]),
        ({"clients_per_round": 0}, ["clients_per_round = 0"]),
        ({"clients_per_round": 1.5}, ["clients_per_round = 1.5"]),
        ({"method": "laplace", "inner": None, "clients_per_round": 2}, ["clients_per_round = 2"]),
        ({"method": "product", "clients_per_round": 2}, ["clients_per_round = 2"]),
        ({"prior": 2.0}, ["prior = 2.0"]),
        ({"prior": fedpa.normal_prior(sd={"w": 2.0})}, ["prior.precision", "['w']"]),
        ({"prior": fedpa.normal_prior(sd=np.ones(4))}, ["prior.precision", "(4,)", "(3,)"]),
        ({"prior": None, "method": "product"}, ["prior = None"]),
        (
            {"prior": fedpa.normal_prior(precision=np.array([1.0, 1.0, 0.0])), "method": "product"},
            ["prior = NormalPrior", "0.]"],
        ),
        ({"prior": None, "clients_per_round": 2}, ["prior = None"]),
        ({"clients_per_round": 1, "rounds": 7}, ["method = 'ep'", "method='sep'"]),
    ],
    ids=str,
)
def test_settings_that_do_not_fit(options, anchors):
    with refused(*anchors):
        infer(**options)


@pytest.mark.parametrize(
    ("function", "anchors"),
    [
        (lambda theta, batch: jnp.sum(batch["y"]), ["log_likelihood", "()", "(8,)"]),
        (lambda theta, batch: batch["x"] * theta[None], ["log_likelihood", "(8, 3)", "(8,)"]),
        (lambda theta, batch: None, ["log_likelihood", "None", "(8,)"]),
        (lambda theta, batch: (batch["y"], 1), ["log_likelihood", "tuple", "(8,)"]),
        (lambda theta, batch: batch["y"].astype(int), ["log_likelihood", "int32", "(8,)"]),
        (lambda theta: theta, ["log_likelihood"]),
    ],
    ids=["one number", "a matrix", "nothing", "a tuple", "integers", "of one argument"],
)
def test_a_log_likelihood_must_give_one_number_per_example(function, anchors):
    with refused(*anchors):
        infer(function)


@pytest.mark.parametrize("method", ["laplace", "ep"])
def test_a_client_whose_precision_is_not_positive_definite_is_named(method):
    """One client's likelihood grows with θ²."""

    def log_likelihood(theta, batch):
        return batch["sign"] * theta**2

    clients = {
        name: {"sign": np.full(5, sign, np.float32)}
        for name, sign in {"a": -1.0, "b": 1.0, "c": -1.0}.items()
    }
    options = {"inner": None} if method == "laplace" else {}
    with refused("client 'b'", kind=fedpa.errors.TooFewClientsError):
        infer(
            log_likelihood,
            np.zeros((), np.float32),
            clients=clients,
            prior=fedpa.normal_prior(sd=2.0),
            method=method,
            **options,
        )


def test_a_log_likelihood_that_is_not_finite_at_the_start_names_its_client():
    with refused("client 'client-0'", "log-likelihood", kind=fedpa.errors.TooFewClientsError):
        infer(lambda theta, batch: conjugate.log_likelihood(theta, batch) + jnp.log(theta[0]))


def test_draws_that_are_too_few_for_dense_matrices():
    few = fedpa.sites.sampled("nuts", chains=2, draws=4)
    params = np.zeros(9, np.float32)
    with refused("draws = 4", "8 draws", "9 parameters", "structure='diagonal'"):
        infer(
            lambda theta, batch: -0.5 * (batch["y"] - theta[0]) ** 2,
            params,
            prior=fedpa.normal_prior(sd=2.0),
            inner=few,
        )


def test_dense_matrices_of_many_parameters():
    with refused("structure = 'dense'", "2,001", "structure='diagonal'"):
        infer(
            lambda theta, batch: batch["y"] * theta[0],
            np.zeros(2001, np.float32),
            prior=fedpa.normal_prior(sd=2.0),
        )
    many = Gaussian(jnp.zeros(2001), Diagonal(jnp.ones(2001)))
    with refused("2,001"):
        fedpa.posterior.Posterior(many, np.zeros(2001, np.float32)).covariance()


def test_clients_that_keep_no_site_or_do_not_exist():
    gaussian = Gaussian(jnp.zeros(1), Diagonal(jnp.ones(1)))
    posterior = fedpa.posterior.Posterior(gaussian, np.zeros(1, np.float32), {"a": gaussian})
    with refused("client = 'b'"):
        posterior.leave_out("b")
    without = posterior._replace(sites={})
    with refused("sites"):
        without.leave_out("a")
    with refused("sites"):
        fedpa.posterior.influence(without)
