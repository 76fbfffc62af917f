"""What every sampler must do. A new sampler joins by being listed in SAMPLERS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpa.samplers import Epochs, Steps, draw, exact, hmc, iasg, nuts, sghmc, sgld
from tests.federations import trees_equal
from tests.samplers.covariances import (
    averaged_covariance,
    langevin_covariance,
    underdamped_covariance,
)
from tests.samplers.gaussian import HESSIAN, check_gaussian, target

TARGET = target(capacity=64)
A = jnp.asarray(HESSIAN, jnp.float32)
RATE, BATCH, WINDOW = 0.1, 10, 20

SAMPLERS = {
    "exact": (
        exact(lambda data: TARGET.posterior._replace(n=data.n.astype(jnp.float32))),
        np.linalg.inv(HESSIAN),  # T = n: covariance A⁻¹
        4_000,
    ),
    "exact-bayes": (
        exact(lambda data: TARGET.posterior._replace(n=data.n.astype(jnp.float32)), 1.0),
        np.linalg.inv(HESSIAN) / 40,
        4_000,
    ),
    "iasg-steps": (
        iasg(
            TARGET.objective,
            optax.sgd(RATE),
            batch_size=BATCH,
            window=Steps(WINDOW, burn_in=200),
            order="replacement",
        ),
        averaged_covariance(A, A / BATCH, RATE, WINDOW),
        20_000,
    ),
    # One epoch per sample: K = n/b = 4 steps.
    "iasg-epochs": (
        iasg(
            TARGET.objective,
            optax.sgd(RATE),
            batch_size=BATCH,
            window=Epochs(burn_in=50),
            order="replacement",
        ),
        averaged_covariance(A, A / BATCH, RATE, 4),
        60_000,
    ),
    # Discarding steps makes samples less correlated and changes nothing else.
    "iasg-discard": (
        iasg(
            TARGET.objective,
            optax.sgd(RATE),
            batch_size=BATCH,
            window=Steps(WINDOW, burn_in=200, discard=20),
            order="replacement",
        ),
        averaged_covariance(A, A / BATCH, RATE, WINDOW),
        10_000,
    ),
    # T = n, at a rate where discretization and gradient noise show: theory knows both.
    "sgld": (
        sgld(
            TARGET.objective,
            RATE,
            batch_size=BATCH,
            window=Steps(WINDOW, burn_in=100),
            order="replacement",
            temperature="n",
        ),
        langevin_covariance(A, A / BATCH, RATE, 1.0),
        10_000,
    ),
    "sgld-bayes": (
        sgld(
            TARGET.objective,
            0.02,
            batch_size=BATCH,
            window=Steps(50, burn_in=200),
            order="replacement",
            temperature=1.0,
        ),
        langevin_covariance(A, A / BATCH, 0.02, 1 / 40),
        10_000,
    ),
    "sghmc": (
        sghmc(
            TARGET.objective,
            RATE,
            batch_size=BATCH,
            window=Steps(WINDOW, burn_in=200),
            order="replacement",
            temperature="n",
            friction=0.3,
        ),
        underdamped_covariance(A, A / BATCH, RATE, 1.0, 0.3),
        10_000,
    ),
    "sghmc-bayes": (
        sghmc(
            TARGET.objective,
            0.01,
            batch_size=BATCH,
            window=Steps(50, burn_in=200),
            order="replacement",
            temperature=1.0,
        ),
        underdamped_covariance(A, A / BATCH, 0.01, 1 / 40),
        10_000,
    ),
    "hmc": (
        hmc(TARGET.objective, 0.3, window=Epochs(50), temperature="n", integration_steps=4),
        np.linalg.inv(HESSIAN),
        10_000,
    ),
    "hmc-bayes": (
        hmc(
            TARGET.objective,
            0.3,
            window=Steps(1, burn_in=50, discard=1),
            temperature=1.0,
            integration_steps=4,
        ),
        np.linalg.inv(HESSIAN) / 40,
        10_000,
    ),
    "nuts": (
        nuts(TARGET.objective, 0.3, window=Epochs(50), temperature="n", max_doublings=5),
        np.linalg.inv(HESSIAN),
        8_000,
    ),
    "nuts-bayes": (
        nuts(
            TARGET.objective,
            0.3,
            window=Epochs(50),
            temperature=1.0,
            max_doublings=5,
        ),
        np.linalg.inv(HESSIAN) / 40,
        8_000,
    ),
    "nuts-dense": (
        nuts(TARGET.objective, mass="dense", window=Epochs(150), max_doublings=5),
        np.linalg.inv(HESSIAN) / 40,
        8_000,
    ),
    "hmc-diagonal": (
        hmc(TARGET.objective, mass="diagonal", window=Epochs(150), integration_steps=2),
        np.linalg.inv(HESSIAN) / 40,
        10_000,
    ),
    "hmc-given": (
        hmc(
            TARGET.objective,
            step_size=0.6,
            mass=np.linalg.inv(HESSIAN) / 40,
            window=Epochs(50),
            integration_steps=2,
        ),
        np.linalg.inv(HESSIAN) / 40,
        10_000,
    ),
}
ADAPTED = ("nuts-dense", "hmc-diagonal")
"""Adapting ε amplifies rounding: in float64, vectorized and single runs agree in ε to 1e-11 after
20 transitions and to 1e-9 (NUTS) or 1e-5 (HMC) after 150, as do single NUTS runs whose starts
differ by a last bit. float32's 1e-7 becomes percents of ε: another chain of the same law, whose
moments `test_mass` has, padded and vectorized."""
START = jnp.array([4.0, 4.0])
WHOLE, PADDED = target(40).data, target(200).data


def among(names):
    """Variants of a sampler that is there already are for the longer suite."""
    longer = ("-bayes", "-discard", "-dense", "-diagonal")
    return [pytest.param(name, marks=[pytest.mark.long] * name.endswith(longer)) for name in names]


# Another temperature is another law and the same program: the law alone is tested again.
@pytest.fixture(params=among(n for n in SAMPLERS if "-bayes" not in n), name="entry")
def _entry(request):
    return SAMPLERS[request.param]


@pytest.fixture(
    params=among(n for n in SAMPLERS if "-bayes" not in n and n not in ADAPTED), name="steady"
)
def _steady(request):
    return SAMPLERS[request.param]


@pytest.fixture(params=among(SAMPLERS), name="law")
def _law(request):
    return SAMPLERS[request.param]


def test_draws_from_its_gaussian(law):
    sampler, covariance, num = law
    check_gaussian(sampler, TARGET.data, TARGET.posterior.mean, covariance, num=num)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_draws_from_its_gaussian_at_other_seeds(law, seed):
    sampler, covariance, num = law
    check_gaussian(sampler, TARGET.data, TARGET.posterior.mean, covariance, num=num, seed=seed)


@functools.cache
def chain(sampler):
    """Three draws as one program: what one test compiles serves the others."""
    return jax.jit(lambda data, key: draw(sampler, START, data, key, 3))


def test_chain_is_a_function_of_its_key(entry):
    one, same, other = (chain(entry[0])(PADDED, jax.random.key(k)) for k in (1, 1, 2))
    assert trees_equal(one, same)
    assert not trees_equal(one[0], other[0])


def test_draws_have_thetas_structure_and_infos_a_loss(entry):
    samples, infos = chain(entry[0])(PADDED, jax.random.key(0))
    assert samples.shape == (3, 2)
    assert samples.dtype == START.dtype
    assert infos.loss.shape == (3,)
    assert bool(jnp.isfinite(infos.loss).all())


def test_padding_does_not_change_the_chain(steady):
    whole, padded = (chain(steady[0])(data, jax.random.key(0))[0] for data in (WHOLE, PADDED))
    np.testing.assert_allclose(whole, padded, rtol=1e-5)


def test_an_empty_clients_samples_are_theta0(entry):
    empty = PADDED._replace(n=jnp.asarray(0, jnp.int32))
    samples, _ = chain(entry[0])(empty, jax.random.key(0))
    np.testing.assert_array_equal(samples, jnp.broadcast_to(START, (3, 2)))


def test_state_does_not_grow(entry):
    sampler = entry[0]
    state = jax.eval_shape(sampler.init, START, PADDED, jax.random.key(0))
    later, _, _ = jax.eval_shape(sampler.sample, state, PADDED)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(state) == shapes(later)


def test_vectorizes_over_clients(steady):
    data = jax.tree.map(lambda x: jnp.stack([x, x]), PADDED)
    keys = jax.random.split(jax.random.key(0), 2)
    together, _ = jax.jit(jax.vmap(chain(steady[0])))(data, keys)
    alone, _ = chain(steady[0])(PADDED, keys[1])
    np.testing.assert_allclose(together[1], alone, rtol=1e-5)
