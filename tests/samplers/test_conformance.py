"""What every sampler must do. A new sampler joins by being listed in SAMPLERS."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpa.samplers import Epochs, Steps, draw, exact, hmc, iasg, nuts, sghmc, sgld
from fedpa.samplers.iasg import averaged_covariance
from fedpa.samplers.sghmc import underdamped_covariance
from fedpa.samplers.sgld import langevin_covariance
from tests.federations import trees_equal
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
        hmc(TARGET.objective, 0.3, window=Epochs(50), integration_steps=4),
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
        nuts(TARGET.objective, 0.3, window=Epochs(50), max_doublings=5),
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
}
START = jnp.array([4.0, 4.0])


# Another temperature is another law and the same program: the law alone is tested again.
@pytest.fixture(params=[name for name in SAMPLERS if "-bayes" not in name], name="entry")
def _entry(request):
    return SAMPLERS[request.param]


@pytest.fixture(params=SAMPLERS, name="law")
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


def test_chain_is_a_function_of_its_key(entry):
    run = jax.jit(lambda key: draw(entry[0], START, TARGET.data, key, 3))
    one, same, other = (run(jax.random.key(k)) for k in (1, 1, 2))
    assert trees_equal(one, same)
    assert not trees_equal(one[0], other[0])


def test_draws_have_thetas_structure_and_infos_a_loss(entry):
    samples, infos = jax.jit(lambda: draw(entry[0], START, TARGET.data, jax.random.key(0), 5))()
    assert samples.shape == (5, 2)
    assert samples.dtype == START.dtype
    assert infos.loss.shape == (5,)
    assert bool(jnp.isfinite(infos.loss).all())


def test_padding_does_not_change_the_chain(entry):
    run = jax.jit(lambda data: draw(entry[0], START, data, jax.random.key(0), 3)[0])
    np.testing.assert_allclose(run(target(40).data), run(target(200).data), rtol=1e-5)


def test_an_empty_clients_samples_are_theta0(entry):
    empty = TARGET.data._replace(n=jnp.asarray(0, jnp.int32))
    samples, _ = jax.jit(lambda: draw(entry[0], START, empty, jax.random.key(0), 3))()
    np.testing.assert_array_equal(samples, jnp.broadcast_to(START, (3, 2)))


def test_state_does_not_grow(entry):
    sampler = entry[0]
    state = jax.eval_shape(sampler.init, START, TARGET.data, jax.random.key(0))
    later, _, _ = jax.eval_shape(sampler.sample, state, TARGET.data)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert shapes(state) == shapes(later)


def test_vectorizes_over_clients(entry):
    data = jax.tree.map(lambda x: jnp.stack([x, x]), TARGET.data)
    keys = jax.random.split(jax.random.key(0), 2)
    run = lambda data, key: draw(entry[0], START, data, key, 2)[0]  # noqa: E731
    together = jax.jit(jax.vmap(run))(data, keys)
    alone = jax.jit(run)(TARGET.data, keys[1])
    np.testing.assert_allclose(together[1], alone, rtol=1e-5)
