"""The posterior of a trained model: exact where it must be, chosen as it says, refused by name."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpa
from fedpa.metrics.streaming import Evaluation
from fedpa.objectives import Likelihood
from fedpa.posterior import (
    PredictionSettings,
    choose_by_marginal_likelihood,
    choose_by_validation,
    evaluate_posterior,
    measure_curvature,
)
from fedpa.posterior.laplace import choose_least
from tests.precisions.test_fisher import outputs as shown
from tests.refusals import refused

RNG = np.random.default_rng(0)
NOISE, SD = 0.5, 2.0


def line(w, batch):
    """A linear model that shows its only layer."""
    x = fedpa.layer_input(batch["x"], w)
    return fedpa.layer_output((x @ w)[:, None], w)[:, 0]


LINE = Likelihood(line, "normal", noise=NOISE)


def make_clients(sizes=(20, 7, 13), d=3, seed=0):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=d)
    clients = {}
    for i, n in enumerate(sizes):
        x = rng.normal(size=(n, d)).astype(np.float32)
        y = (x @ w + NOISE * rng.normal(size=n)).astype(np.float32)
        clients[f"c{i}"] = {"x": x, "y": y}
    return clients


CLIENTS = make_clients()
X, Y = (np.concatenate([c[k] for c in CLIENTS.values()]).astype(np.float64) for k in "xy")
PRECISION = X.T @ X / NOISE**2 + np.eye(3) / SD**2
MODE = np.linalg.solve(PRECISION, X.T @ Y / NOISE**2)
MODEL = MODE.astype(np.float32)
STRUCTURES = ["kronecker", "last-layer", "diagonal", "low-rank"]


def measure(structure, model=MODEL, likelihood=LINE, clients=CLIENTS, **options):
    return measure_curvature(
        model, likelihood, clients, structure=structure, progress=False, **options
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_linear_regression_is_the_textbook_posterior(structure):
    """K-FAC's factors are exact for a layer of one output with constant curvature."""
    posterior = measure(structure).posterior(prior_precision=1 / SD**2)
    wanted = np.linalg.inv(PRECISION)
    if structure == "diagonal":
        wanted = np.diag(1 / np.diag(PRECISION))
    np.testing.assert_allclose(posterior.covariance(), wanted, rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(posterior.mean, MODE, rtol=1e-5)


@pytest.mark.parametrize(
    "structure", [pytest.param("kronecker", marks=pytest.mark.long), "diagonal"]
)
def test_clients_may_come_in_any_split(structure):
    pooled = {"all": {k: np.concatenate([c[k] for c in CLIENTS.values()]) for k in "xy"}}
    one, other = (measure(structure, clients=c).posterior(1.0).sd for c in (CLIENTS, pooled))
    np.testing.assert_allclose(one, other, rtol=1e-4)


def test_temperature_and_prior_are_as_stated():
    curvature = measure("kronecker")
    cold, plain = curvature.posterior(3.0, temperature=4.0), curvature.posterior(12.0)
    np.testing.assert_allclose(cold.covariance(), 4 * plain.covariance(), rtol=1e-3)


@pytest.mark.parametrize("structure", ["kronecker", "last-layer"])
def test_the_marginal_likelihood_is_that_of_linear_regression(structure):
    """Differences between prior precisions, of which ℓ(θ*) drops out at the same θ*."""
    curvature = measure(structure)

    def exact(prior):
        """log N at θ* of the prior, less log of the posterior's normalization: Laplace's terms."""
        whole = X.T @ X / NOISE**2 + prior * np.eye(3)
        return 0.5 * (3 * np.log(prior) - prior * MODE @ MODE - np.linalg.slogdet(whole)[1])

    found = curvature.log_marginal_likelihood(0.2) - curvature.log_marginal_likelihood(5.0)
    assert found == pytest.approx(exact(0.2) - exact(5.0), rel=1e-3)


def test_the_marginal_likelihood_finds_the_size_of_the_weights():
    """d = 40 weights of sd 0.1: the chosen precision is within a factor of three of 100."""
    rng = np.random.default_rng(1)
    w = 0.1 * rng.normal(size=40)
    x = rng.normal(size=(400, 40)).astype(np.float32)
    y = (x @ w + NOISE * rng.normal(size=400)).astype(np.float32)
    mode = np.linalg.solve(x.T @ x + NOISE**2 * 100 * np.eye(40), x.T @ y)
    curvature = measure("last-layer", mode.astype(np.float32), clients={"a": {"x": x, "y": y}})
    assert 30 < choose_by_marginal_likelihood(curvature) < 330


def test_validation_clients_choose_the_best_of_the_grid():
    validation = make_clients((30,), seed=3)
    curvature = measure("last-layer")
    measured = evaluate_posterior(LINE, fedpa.data.from_mapping(validation), PredictionSettings(10))
    prior, temperature = choose_by_validation(curvature, measured)

    def nll(prior, temperature=1.0):
        posterior = curvature.posterior(prior, temperature)
        return measured(posterior, jax.random.key(0)).values["nll"]

    assert nll(prior, temperature) <= min(nll(p) for p in (0.1, 10.0, 1000.0)) + 1e-6


@pytest.mark.parametrize(("gain", "chosen"), [(1e-5, 1.0), (1e-3, 3.0)])
def test_another_temperature_must_be_better_by_more_than_rounding(gain, chosen):
    curvature = measure("diagonal")
    at_three = curvature.posterior(1e-3, 3.0).sd

    def measured(posterior, key):
        """T = 3 is better by this share of the NLL."""
        less = gain if np.allclose(posterior.sd, at_three) else 0.0
        return Evaluation({"nll": 2.0 - 2.0 * less}, {}, clients=1, examples=1)

    assert choose_by_validation(curvature, measured, 1e-3) == (1e-3, chosen)


def test_a_temperature_without_finite_loss_is_not_chosen():
    curvature = measure("diagonal")
    at_one = curvature.posterior(1e-3).sd

    def measured(posterior, key):
        nll = math.inf if np.allclose(posterior.sd, at_one) else 2.0
        return Evaluation({"nll": nll}, {}, clients=1, examples=1)

    assert choose_by_validation(curvature, measured, 1e-3)[1] != 1.0


def test_low_rank_has_the_variances_of_what_it_misses():
    """d = 60, rank 5: without a diagonal all other directions had the prior's variance."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 60)).astype(np.float32)
    y = x.sum(axis=1)
    curvature = measure(
        "low-rank", np.zeros(60, np.float32), clients={"a": {"x": x, "y": y}}, rank=5
    )
    wanted = np.linalg.inv(x.T @ x / NOISE**2 + np.eye(60))
    found = np.asarray(curvature.posterior(1.0).sd) ** 2
    assert 0.5 < found.mean() / np.diag(wanted).mean() < 1.5
    whole = np.diag(np.asarray(curvature.fisher.columns @ curvature.fisher.columns.T))
    np.testing.assert_allclose(
        whole + curvature.fisher.diagonal, (x**2).sum(axis=0) / NOISE**2, rtol=1e-3
    )


def half_shown(params, batch):
    """A network whose first layer alone shows what leaves it."""
    x = fedpa.layer_input(batch["x"], params["w1"])
    h = jnp.tanh(fedpa.layer_output(x @ params["w1"], params["w1"]))
    return fedpa.layer_input(h, params["w2"]) @ params["w2"]


def inputs_shown(params, batch):
    x = fedpa.layer_input(batch["x"], params["w1"])
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def test_a_layer_that_does_not_show_what_leaves_it_is_named():
    options = {"model": {k: NET[k] for k in ("w1", "w2")}, "clients": NET_CLIENTS}
    with pytest.warns(UserWarning, match="w2"):
        measure("kronecker", likelihood=Likelihood(half_shown), **options)
    with refused("structure = 'kronecker'", "layer_output"):
        measure("kronecker", likelihood=Likelihood(inputs_shown), **options)


def test_a_run_on_other_data_is_refused(tmp_path):
    method = fedpa.fedavg(fedpa.LocalTraining(0.01, 4), fedpa.Server(fedpa.server.sgd(1.0)))
    settings = {"rounds": 1, "clients_per_round": 2, "out": tmp_path / "run", "progress": False}
    fedpa.fit(LINE.loss, MODEL, CLIENTS, method, **settings)
    run = fedpa.load(tmp_path / "run", params=MODEL)
    measure("diagonal", run)
    changed = CLIENTS | {"c0": {k: 2 * v for k, v in CLIENTS["c0"].items()}}
    with refused("clients = '3 clients'"):
        measure("diagonal", run, clients=changed)
    measure("diagonal", run.params, clients=changed)


NET = {
    "w1": jnp.asarray(RNG.normal(size=(3, 2)), jnp.float32),
    "b1": jnp.zeros(2),
    "w2": jnp.asarray(RNG.normal(size=(2, 3)), jnp.float32),
    "c": jnp.float32(1.0),
}
NET_CLIENTS = {
    name: {"x": RNG.normal(size=(n, 3)).astype(np.float32), "y": RNG.integers(0, 3, n, np.int32)}
    for name, n in (("a", 9), ("b", 4))
}
NETWORK = Likelihood(shown)


@pytest.mark.parametrize(
    "structure",
    [pytest.param(s, marks=[pytest.mark.long] * (s != "last-layer")) for s in STRUCTURES],
)
def test_linearized_draws_predict_as_the_jacobians_do(structure):
    """Means of 4,000 linearized draws against the linearized prediction, in log-odds."""
    options = {"rank": 4} if structure == "low-rank" else {}
    posterior = measure(structure, NET, NETWORK, NET_CLIENTS, **options).posterior(10.0)
    x = NET_CLIENTS["a"]["x"]
    outputs = fedpa.posterior.draw_outputs(NETWORK, linearized=True)
    drawn = fedpa.posterior.draw_models(posterior, jax.random.key(0), 2000)
    f = np.asarray(jax.jit(outputs)(drawn, {"x": jnp.asarray(x)}))
    found = posterior.predict(lambda p, x: shown(p, {"x": x}), x, linearized=True)
    np.testing.assert_allclose(f.mean(axis=0), found.mean, atol=1e-5)  # draws come in pairs
    np.testing.assert_allclose(f.std(axis=0), found.sd, rtol=0.1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_deviations_of_half_precision_models_are_not_rounded_off(dtype):
    """f = θ₁ with θ = 1 and sd 1e-4, which is below the dtype's rounding at 1."""
    one = Likelihood(lambda w, batch: batch["x"] @ w, "normal")
    density = fedpa.posterior.Normal(jnp.ones(1, dtype), fedpa.precisions.Scalar(jnp.float32(1e8)))
    posterior = fedpa.Posterior(density, jnp.ones(1, dtype))
    drawn = fedpa.posterior.draw_models(posterior, jax.random.key(0), 250)
    f = fedpa.posterior.draw_outputs(one, linearized=True)(drawn, {"x": jnp.ones((1, 1), dtype)})
    deviations = jax.tree.leaves(drawn.deviations)[0]
    assert deviations.std() == pytest.approx(1e-4, rel=0.1)
    assert f.shape == (500, 1)


def test_what_is_not_finite_is_not_chosen():
    assert choose_least((1.0, 2.0, 3.0), {1.0: np.nan, 2.0: 5.0, 3.0: 4.0}.get) == 3.0
    with refused("no trial"):
        choose_least((1.0,), lambda x: np.nan)


def test_the_last_layer_is_the_last_that_is_shown_or_named():
    assert measure("last-layer", NET, NETWORK, NET_CLIENTS).over == ("w2",)
    found = measure("last-layer", NET, NETWORK, NET_CLIENTS, layer="b1")
    assert found.over == ("b1",)
    posterior = found.posterior(1.0)
    assert not np.asarray(posterior.sd["w2"]).any()
    assert np.asarray(posterior.sd["b1"]).all()


def test_one_seed_gives_one_posterior():
    """Sampled labels among it; another seed gives others."""
    one, same, other = (
        measure("diagonal", NET, NETWORK, NET_CLIENTS, seed=s).posterior(1.0).sd["w1"]
        for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def hidden(params, batch):
    return batch["x"] @ params["w"]


@pytest.mark.parametrize(
    ("changes", "anchors"),
    [
        ({"structure": "dense"}, ["structure = 'dense'"]),
        ({"structure": "kronecker"}, ["structure = 'kronecker'", "last-layer", "w"]),
        ({"structure": "last-layer"}, ["structure = 'last-layer'", "w"]),
        ({"structure": "last-layer", "layer": "x"}, ["layer = 'x'", "w"]),
        ({"structure": "diagonal", "layer": "w"}, ["layer = 'w'"]),
        ({"structure": "diagonal", "likelihood": hidden}, ["likelihood"]),
        ({"structure": "diagonal", "labels": "few"}, ["labels = 'few'"]),
        ({"structure": "low-rank", "rank": 0}, ["rank = 0"]),
        ({"structure": "diagonal", "seed": -1}, ["seed = -1"]),
    ],
)
def test_what_does_not_fit_is_refused(changes, anchors):
    options = {"likelihood": Likelihood(hidden), "progress": False} | changes
    with refused(*anchors):
        measure_curvature({"w": np.ones((3, 3), np.float32)}, clients=NET_CLIENTS, **options)


def test_a_precision_that_is_none_is_refused():
    curvature = measure("diagonal")
    for prior in (0.0, -1.0, np.inf):
        with refused("prior_precision"):
            curvature.posterior(prior)
    with refused("temperature = 0"):
        curvature.posterior(1.0, temperature=0)
