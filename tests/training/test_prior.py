"""Training with a prior: the optimum is the global posterior's mode, whatever the split."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.data import from_mapping, pool_clients
from fedpa.objectives import least_squares
from tests.federations import least_squares_clients, trees_equal
from tests.refusals import refused

PRIOR = fedpa.normal_prior(np.array([1.0, -2.0, 0.5]), sd=np.array([0.2, 0.3, 0.4]))
WIDE = fedpa.normal_prior(sd=2.0)
POOL = least_squares_clients(sizes=(40,))["client-0000"]
RATE = 0.3
LOCAL = fedpa.LocalTraining(RATE, batch_size=64)
"""One step a round, on all of a client's examples: with all clients, gradient descent."""
SIDE = fedpa.Server(fedpa.server.sgd(1.0))
METHODS = {
    "fedavg": fedpa.fedavg(LOCAL, SIDE),
    "fedprox": fedpa.fedprox(LOCAL, SIDE, proximal=0.1),
    "scaffold": fedpa.scaffold(LOCAL, SIDE),
    "mime": fedpa.mime(LOCAL, SIDE, base=fedpa.algorithms.momentum(0.0)),
    "mime-lite": fedpa.mime_lite(LOCAL, SIDE, base=fedpa.algorithms.momentum(0.0)),
    "mb-sgd": fedpa.mb_sgd(LOCAL, fedpa.Server(fedpa.server.sgd(RATE))),
}
OBJECTIVE = fedpa.Objective(least_squares.loss, prior=PRIOR)


def split(cuts):
    """The pool's examples as clients."""
    parts = itertools.pairwise([0, *sorted(cuts), 40])
    return {f"c{i}": {k: v[a:b] for k, v in POOL.items()} for i, (a, b) in enumerate(parts)}


def textbook_mean():
    x, y = (POOL[k].astype(np.float64) for k in ("x", "y"))
    precision = PRIOR.precision
    return np.linalg.solve(np.diag(precision) + x.T @ x, precision * PRIOR.mean + x.T @ y)


def fit(clients, method, objective=OBJECTIVE, params=None, **options):
    params = np.zeros(3, np.float32) if params is None else params
    settings = {"rounds": 150, "clients_per_round": len(clients), "progress": False} | options
    settings["engine"] = fedpa.engines.per_client()  # fewer programs to compile
    return fedpa.fit(objective, params, clients, method, **settings)


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param((), marks=pytest.mark.long, id="1"),
        pytest.param((1,), marks=pytest.mark.long, id="2"),
        pytest.param((3, 8, 9, 20, 21, 39), id="7"),
    ],
)
def test_mb_sgd_reaches_the_maximum_of_the_posterior_whatever_the_split(cuts):
    found = fedpa.simulate(
        OBJECTIVE,
        np.zeros(3, np.float32),
        split(cuts),
        METHODS["mb-sgd"],
        rounds=150,
        clients_per_round=7,
        seeds=1,
    )
    np.testing.assert_allclose(found.params[0], textbook_mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "fedavg")) for name in METHODS],
)
def test_every_method_has_the_prior_once(name):
    found = fit(split({5, 12, 30}), METHODS[name])
    np.testing.assert_allclose(found.params, textbook_mean(), rtol=1e-3, atol=1e-4)


def test_centralized_training_has_the_prior_once():
    pool = pool_clients(from_mapping(split({5, 12, 30})), clients=4, seed=0)
    found = fedpa.fit(
        OBJECTIVE,
        np.zeros(3, np.float32),
        pool,
        fedpa.centralized(LOCAL),
        rounds=150,
        clients_per_round=1,
        progress=False,
    )
    np.testing.assert_allclose(found.params, textbook_mean(), rtol=1e-3, atol=1e-4)


def test_a_prior_is_over_the_arrays_that_are_trained():
    """Given as a number, for the trained leaves, or for all leaves of the model."""
    params = {"w": np.ones(3, np.float32), "power": 2, "act": jnp.tanh, "ids": np.arange(4)}

    def loss(params, batch, key):
        return jnp.abs(batch["x"] @ params["w"] - batch["y"]) ** params["power"]

    sd = {"w": 0.5, "power": 1.0, "act": 1.0, "ids": 1.0}
    priors = {
        "number": fedpa.normal_prior(sd=0.5),
        "trained": fedpa.normal_prior(sd={"w": 0.5, "power": None, "act": None, "ids": None}),
        "all": fedpa.normal_prior({**params, "w": np.zeros(3)}, sd=sd),
    }
    clients = split({5, 12})

    def run(**options):
        return fit(clients, METHODS["fedavg"], loss, params, rounds=3, **options).params["w"]

    found = {name: run(prior=prior) for name, prior in priors.items()}
    assert trees_equal(found["number"], found["trained"])
    assert trees_equal(found["number"], found["all"])
    assert not trees_equal(found["number"], run())

    class Own:
        """A prior of one's own is given the model."""

        def log_density(self, params):
            return -0.5 * params["power"] * 2.0 * jnp.sum(params["w"] ** 2)

    np.testing.assert_allclose(run(prior=Own()), found["number"], rtol=1e-5)


def test_fit_takes_a_prior_or_the_objective_has_it():
    clients, method = split({5, 12}), METHODS["mb-sgd"]
    given_it = fit(clients, method, least_squares.loss, rounds=3, prior=PRIOR)
    assert trees_equal(given_it.params, fit(clients, method, rounds=3).params)
    with refused("prior = NormalPrior"):
        fit(clients, method, prior=PRIOR)
    with refused("prior = 2.0"):
        fit(clients, method, least_squares.loss, prior=2.0)
    with refused("prior.precision", "(4,)", "(3,)"):
        fit(clients, method, least_squares.loss, prior=fedpa.normal_prior(sd=np.ones(4)))


def test_the_number_of_all_examples_may_be_given():
    """As where clients are part of a federation: ten times as many weaken the prior."""
    clients, method = split({5, 12}), METHODS["mb-sgd"]
    more = fit(clients, method, OBJECTIVE._replace(num_examples=400))
    weaker = fit(
        clients, method, OBJECTIVE._replace(prior=PRIOR._replace(precision=PRIOR.precision / 10))
    )
    np.testing.assert_allclose(more.params, weaker.params, rtol=1e-4)


def test_estimate_and_compare_take_it(tmp_path):
    clients, start = split({5, 12, 20, 30}), np.zeros(3, np.float32)
    cost = fedpa.estimate(OBJECTIVE, start, clients, METHODS["fedavg"], clients_per_round=2)
    assert cost.parameters == 3

    def compare(objective):
        return fedpa.compare(
            {"one": METHODS["fedavg"]},
            objective,
            start,
            clients,
            rounds=2,
            clients_per_round=2,
            seeds=1,
            validation=0.25,
            out=tmp_path / "both",
            progress=False,
        )

    compare(OBJECTIVE)
    with refused("prior.precision was", "and is"):
        compare(OBJECTIVE._replace(prior=fedpa.normal_prior(sd=1.0)))


class Own:
    def __init__(self, scale):
        self.scale = scale

    def log_density(self, theta):
        return -self.scale * jnp.sum(jnp.abs(theta))


@pytest.mark.parametrize(
    ("prior", "other", "field"),
    [
        # At θ₀ = 0, their mean, both have the same density and the same gradient.
        (WIDE, WIDE._replace(precision=0.125), "prior.precision was 0.25 and is 0.125"),
        (WIDE, None, "prior.mean was 0.0 and is not set"),
        (None, WIDE, "prior.mean was not set and is 0.0"),
        (PRIOR, PRIOR._replace(mean=-PRIOR.mean), "prior.fingerprint was"),
        (Own(1.0), Own(2.0), "prior.density was"),
    ],
)
def test_a_run_is_resumed_with_its_own_prior_only(tmp_path, prior, other, field):
    clients, method, start = split({5, 12}), METHODS["fedavg"], np.zeros(3, np.float32)
    own = (least_squares.loss, start, clients, method)
    fit(clients, method, least_squares.loss, rounds=2, prior=prior, out=tmp_path / "run")
    with refused(field):
        fedpa.resume(tmp_path / "run", *own, rounds=3, prior=other, progress=False)
    longer = fedpa.resume(tmp_path / "run", *own, rounds=3, prior=prior, progress=False)
    whole = fit(clients, method, least_squares.loss, rounds=3, prior=prior)
    assert trees_equal(longer.params, whole.params)
