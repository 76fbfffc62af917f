"""Mass matrices and step sizes of HMC and NUTS, on a Gaussian that is hard without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa import Objective
from fedpa.objectives import client_data
from fedpa.samplers import Epochs, diagnose, draw, draw_chains, hmc, nuts, worst
from fedpa.samplers.hamiltonian import mass_windows
from tests.refusals import refused

SIZE, EXAMPLES = 6, 10
CONDITION = 1e4
ROTATION = np.linalg.qr(np.random.default_rng(0).standard_normal((SIZE, SIZE)))[0]
COVARIANCE = (ROTATION * np.geomspace(1, 1 / CONDITION, SIZE)) @ ROTATION.T
"""Of the Bayesian posterior: correlated, of condition number 10⁴."""
MEAN = np.linspace(-1, 2, SIZE)
DATA = client_data({"x": np.zeros((EXAMPLES, 1), np.float32)}, capacity=16)
CHAINS = 4


def loss(theta, batch, key):
    """n mean losses have the Hessian Σ⁻¹."""
    del key
    root = jnp.asarray(np.linalg.cholesky(np.linalg.inv(COVARIANCE)).T, theta.dtype)
    z = root @ (theta - jnp.asarray(MEAN, theta.dtype))
    return jnp.broadcast_to(0.5 / EXAMPLES * jnp.sum(z**2), batch["x"].shape[:1])


OBJECTIVE = Objective(loss)
OPTIONS = {
    "nuts-dense": (nuts, {"mass": "dense", "window": Epochs(500)}, 1_000),
    "nuts-given": (
        nuts,
        {"mass": COVARIANCE.astype(np.float32), "step_size": 0.7, "window": Epochs(50)},
        1_000,
    ),
    "hmc-dense": (
        hmc,
        {"mass": "dense", "window": Epochs(500), "integration_steps": 4, "target_acceptance": 0.9},
        2_000,
    ),
    "hmc-given": (
        hmc,
        {
            "mass": COVARIANCE.astype(np.float32),
            "step_size": 0.4,
            "window": Epochs(50),
            "integration_steps": 4,
        },
        2_000,
    ),
}


def run(sampler, num, seed=0):
    noise = np.random.default_rng(9).standard_normal((CHAINS, SIZE))
    starts = jnp.asarray(MEAN + noise, jnp.float32)
    return draw_chains(sampler, starts, DATA, jax.random.key(seed), num)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n != "nuts-dense")) for n in OPTIONS],
)
def test_moments_are_the_posteriors(name):
    build, options, num = OPTIONS[name]
    samples, infos = run(build(OBJECTIVE, **options), num)
    found = diagnose(samples, infos)
    assert worst(found).rhat < 1.01
    assert worst(found).ess > 0.2 * CHAINS * num
    assert found.divergences == 0
    # In coordinates in which the posterior is N(0, I), each moment in its own standard errors.
    root = np.linalg.cholesky(np.linalg.inv(COVARIANCE)).T
    z = (np.asarray(samples, np.float64).reshape(-1, SIZE) - MEAN) @ root.T
    ess = worst(diagnose((np.asarray(samples, np.float64) - MEAN) @ root.T, infos)).ess
    assert ess > 0.1 * CHAINS * num, "too few draws to tell"
    assert np.abs(z.mean(0)).max() < 4.5 / np.sqrt(ess)
    # Squares decorrelate no faster than half the draws' effective number.
    assert np.abs(np.cov(z.T) - np.eye(SIZE)).max() < 4.5 * np.sqrt(2 / (0.5 * ess))


def efficiency(sampler, num):
    """Effective draws of the worst parameter per 1,000 gradients."""
    samples, infos = run(sampler, num)
    root = np.linalg.cholesky(np.linalg.inv(COVARIANCE)).T
    z = np.asarray(samples, np.float64) @ root.T
    return 1_000 * worst(diagnose(z, infos)).ess / int(np.sum(infos.gradients))


@pytest.mark.filterwarnings("ignore:draws can't be trusted")
@pytest.mark.long
def test_a_mass_is_worth_many_gradients():
    """Measured: 1.3, 190 and 214 effective draws per 1,000 gradients."""
    identity = efficiency(nuts(OBJECTIVE, window=Epochs(100)), 200)
    dense = efficiency(nuts(OBJECTIVE, mass="dense", window=Epochs(500)), 300)
    given = efficiency(nuts(OBJECTIVE, mass=COVARIANCE.astype(np.float32), window=Epochs(100)), 300)
    assert dense > 10 * identity
    assert 0.5 < given / dense < 2


@pytest.mark.long
def test_a_traced_mass_is_the_given_one():
    given = COVARIANCE.astype(np.float32)

    def few(mass):
        sampler = hmc(OBJECTIVE, step_size=0.4, mass=mass)
        return draw(sampler, jnp.zeros(SIZE), DATA, jax.random.key(0), 5)[0]

    np.testing.assert_allclose(jax.jit(few)(given), few(given), rtol=1e-4, atol=1e-5)


def test_a_step_size_is_the_one_of_its_learning_rate():
    rate = 1e-4
    by_rate, by_step = (
        draw(hmc(OBJECTIVE, **own), jnp.zeros(SIZE), DATA, jax.random.key(0), 5)[0]
        for own in ({"learning_rate": rate}, {"step_size": np.sqrt(rate / EXAMPLES).item()})
    )
    np.testing.assert_allclose(by_rate, by_step, rtol=1e-5)


@pytest.mark.parametrize("burn_in", [120, 121, 150, 300, 1_000, 5_000])
def test_windows_fill_the_burn_in(burn_in):
    lengths = mass_windows(burn_in)
    assert sum(lengths) == burn_in
    assert min(lengths) >= 15
    assert len(lengths) >= 4
    assert max(lengths[1:-1]) >= burn_in // 3


@pytest.mark.parametrize("build", [hmc, nuts])
@pytest.mark.parametrize(
    ("options", "anchor"),
    [
        ({"learning_rate": 0.1, "step_size": 0.2}, "step_size = 0.2"),
        ({"step_size": 0.0}, "step_size = 0.0"),
        ({"step_size": float("nan")}, "step_size = nan"),
        ({}, "step_size = None"),
        ({"mass": "full", "step_size": 1.0}, "mass = 'full'"),
        ({"mass": "dense", "window": Epochs(119)}, "mass = 'dense'"),
        ({"mass": 2.0, "step_size": 1.0}, "mass = 2.0"),
        ({"mass": np.ones((2, 3)), "step_size": 1.0}, "mass = array"),
        ({"mass": np.array([1.0, 0.0]), "step_size": 1.0}, "mass = array([1., 0.])"),
        ({"mass": -np.eye(2), "step_size": 1.0}, "mass = array"),
        ({"mass": np.array([[1.0, 0.5], [0.0, 1.0]]), "step_size": 1.0}, "mass = array"),
        ({"mass": np.ones(2), "learning_rate": 0.1}, "learning_rate = 0.1"),
    ],
)
def test_refusals(build, options, anchor):
    with refused(anchor[:-1] if anchor.endswith(")") else anchor):
        build(OBJECTIVE, **options)


def test_refusals_that_need_the_number_of_parameters():
    for mass in (np.ones(3), np.eye(3)):
        with refused("mass", "(3,", "6 parameters"):
            draw(
                hmc(OBJECTIVE, step_size=1.0, mass=mass),
                jnp.zeros(SIZE),
                DATA,
                jax.random.key(0),
                1,
            )
    many = Objective(lambda theta, batch, key: jnp.sum(theta**2) * jnp.ones(batch["x"].shape[0]))
    with refused("mass = 'dense'", "50 parameters"):
        sampler = hmc(many, mass="dense", window=Epochs(120))
        draw(sampler, jnp.zeros(50), DATA, jax.random.key(0), 1)
