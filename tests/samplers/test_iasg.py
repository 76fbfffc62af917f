import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpa.objectives import Objective, client_data
from fedpa.objectives.minibatches import batch_in_order, epoch_order
from fedpa.samplers import Epochs, Steps, draw, exact, iasg
from tests.refusals import refused
from tests.samplers.covariances import averaged_covariance
from tests.samplers.gaussian import HESSIAN, target

OBJECTIVE = Objective(lambda theta, batch, key: 0.5 * (theta - batch["z"]) ** 2)
DATA = client_data({"z": np.arange(7, dtype=np.float32)}, 16)
KEY = jax.random.key(3)
ORDER, BATCH_IN_ORDER = jax.jit(epoch_order), jax.jit(batch_in_order, static_argnums=3)


def by_hand(optimizer, theta, epochs):
    """Algorithm 4 written as a Python loop over the same batches: all iterates, by epoch."""
    state, iterates = optimizer.init(theta), []
    for epoch in range(epochs):
        key = jax.random.fold_in(jax.random.fold_in(KEY, 3), epoch)
        order, visited = ORDER(DATA, key), []
        for index in range(3):  # ⌈7/3⌉, the last batch of one example a step of its own
            batch = BATCH_IN_ORDER(DATA, order, jnp.asarray(index), 3)
            z, w = np.asarray(batch.examples["z"]), np.asarray(batch.weights)
            gradient = jnp.asarray(float(((np.asarray(theta) - z) * w).sum() / w.sum()))
            updates, state = optimizer.update(gradient, state, theta)
            theta = optax.apply_updates(theta, updates)
            visited.append(float(theta))
        iterates.append(visited)
    return iterates


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.sgd(0.1, 0.9), optax.adam(0.1)])
def test_a_sample_is_the_mean_of_an_epochs_iterates(optimizer):
    """ClientOpt's state is carried across epochs and samples."""
    sampler = iasg(OBJECTIVE, optimizer, batch_size=3, window=Epochs(burn_in=1))
    with jax.numpy_dtype_promotion("standard"):  # optax's own Adam promotes
        samples, infos = draw(sampler, jnp.asarray(0.0), DATA, KEY, 2)
        iterates = by_hand(optimizer, jnp.asarray(0.0), 3)
    np.testing.assert_allclose(samples, [np.mean(iterates[1]), np.mean(iterates[2])], rtol=1e-5)
    assert infos.steps.tolist() == [3, 3]


def test_without_averaging_it_is_local_sgd():
    sampler = iasg(OBJECTIVE, optax.sgd(0.1), batch_size=3, average=False)
    samples, _ = draw(sampler, jnp.asarray(0.0), DATA, KEY, 2)
    iterates = by_hand(optax.sgd(0.1), jnp.asarray(0.0), 2)
    np.testing.assert_allclose(samples, [iterates[0][-1], iterates[1][-1]], rtol=1e-5)


def test_steps_run_on_across_samples_and_epochs():
    """B = 2, discard 1, K = 2 over epochs of 3 steps: iterates 3 4, then 6 7 (from 0)."""
    sampler = iasg(OBJECTIVE, optax.sgd(0.1), batch_size=3, window=Steps(2, burn_in=2, discard=1))
    samples, infos = draw(sampler, jnp.asarray(0.0), DATA, KEY, 2)
    flat = np.concatenate(by_hand(optax.sgd(0.1), jnp.asarray(0.0), 3))
    np.testing.assert_allclose(samples, [flat[3:5].mean(), flat[6:8].mean()], rtol=1e-5)
    assert infos.steps.tolist() == [2, 2]


def test_long_windows_tend_to_the_sandwich():
    """(1/K) A⁻¹CA⁻¹, whatever the learning rate (Mandt et al. 2017)."""
    a, c = jnp.asarray(HESSIAN), jnp.asarray(HESSIAN) / 10
    sandwich = np.linalg.inv(HESSIAN) @ np.asarray(c) @ np.linalg.inv(HESSIAN)
    for rate in (0.05, 0.3):
        scaled = 20_000 * averaged_covariance(a, c, rate, 20_000)
        np.testing.assert_allclose(scaled, sandwich, rtol=0.01)


def test_reshuffled_epochs_spread_less_than_independent_draws():
    t = target()
    spread = {}
    for order in ("shuffle", "replacement"):
        sampler = iasg(
            t.objective, optax.sgd(0.1), batch_size=10, window=Epochs(burn_in=20), order=order
        )
        samples, _ = jax.jit(
            lambda sampler=sampler: draw(sampler, t.posterior.mean, t.data, KEY, 2000)
        )()
        spread[order] = float(jnp.trace(jnp.cov(samples.T)))
    assert spread["shuffle"] < 0.2 * spread["replacement"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"batch_size": 0}, "batch_size = 0"),
        ({"batch_size": 1, "window": Steps(0)}, "steps_per_sample = 0"),
        ({"batch_size": 1, "window": Epochs(-1)}, "burn_in = -1"),
        ({"batch_size": 1, "window": Steps(1, discard=-1)}, "discard_steps = -1"),
    ],
)
def test_bad_settings_are_refused(options, field):
    with refused(field):
        iasg(OBJECTIVE, optax.sgd(0.1), **options)


def test_bad_temperature_and_number_are_refused():
    with refused("temperature = 0.0"):
        exact(lambda data: target().posterior, 0.0)
    with refused("num = 0"):
        draw(iasg(OBJECTIVE, optax.sgd(0.1), batch_size=1), jnp.asarray(0.0), DATA, KEY, 0)


def test_bad_losses_and_data_are_refused_alone_too():
    scalar = iasg(Objective(lambda t, b, k: jnp.mean(b["z"]) * t), optax.sgd(0.1), batch_size=2)
    with refused("loss"):
        draw(scalar, jnp.asarray(0.0), DATA, KEY, 1)
    good = iasg(OBJECTIVE, optax.sgd(0.1), batch_size=2)
    with refused("z[1] = nan"):
        draw(good, jnp.asarray(0.0), {"z": np.array([1.0, np.nan], np.float32)}, KEY, 1)


def test_exact_draws_of_a_singular_posterior_keep_theta0s_null_space():
    from fedpa.objectives import least_squares

    x = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], np.float32)
    data = client_data({"x": x, "y": np.array([1.0, 2.0], np.float32)})
    start = jnp.array([5.0, 5.0, 7.0])
    samples, _ = draw(exact(least_squares.posterior), start, data, KEY, 500)
    np.testing.assert_allclose(samples[:, 2], 7.0, rtol=1e-6)
    np.testing.assert_allclose(samples.mean(0)[:2], [1.0, 1.0], atol=0.3)
    assert float(samples[:, 0].std()) > 0.5
