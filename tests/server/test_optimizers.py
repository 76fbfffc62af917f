"""Server optimizers against their formulas, written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

from fedpa import server
from tests.refusals import refused
from tests.strategies import arrays, powers_of_two

RATE = 0.5


def run(optimizer, deltas):
    """θ after each step, from θ = 1."""
    theta = {"w": jnp.ones(3)}
    state, seen = optimizer.init(theta), []
    step = jax.jit(optimizer.update)
    for delta in deltas:
        updates, state = step({"w": jnp.asarray(delta, jnp.float32)}, state, theta)
        theta = optax.apply_updates(theta, updates)
        seen.append(np.asarray(theta["w"]))
    return seen


def keras_sgd(deltas, momentum=0.9):
    x, velocity = np.ones(3), np.zeros(3)
    for g in deltas:
        velocity = momentum * velocity - RATE * g
        x = x + velocity
        yield x


def keras_adam(deltas, tau=1e-3, b1=0.9, b2=0.99):
    x, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(deltas, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        x = x - RATE * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + tau)
        yield x


def keras_adagrad(deltas, tau=1e-5):
    x, v = np.ones(3), np.zeros(3)
    for g in deltas:
        v = v + g**2
        x = x - RATE * g / (np.sqrt(v) + tau)
        yield x


def reddi(second_moment, deltas, tau=1e-3, b1=0.9):
    """Reddi et al. 2021, Algorithm 2, as printed: no bias correction, v starts at τ²."""
    x, m, v = np.ones(3), np.zeros(3), np.full(3, tau**2)
    for g in deltas:
        m = b1 * m + (1 - b1) * g
        v = second_moment(v, g**2)
        x = x - RATE * m / (np.sqrt(v) + tau)
        yield x


def experiments_yogi(deltas, tau=1e-3, b1=0.9, b2=0.99):
    """As in the code of Reddi et al.'s experiments: with bias correction."""
    x, m, v = np.ones(3), np.zeros(3), np.full(3, 1e-6)
    for t, g in enumerate(deltas, start=1):
        m, v = b1 * m + (1 - b1) * g, v + (1 - b2) * np.sign(g**2 - v) * g**2
        x = x - RATE * np.sqrt(1 - b2**t) / (1 - b1**t) / (np.sqrt(v) + tau) * m
        yield x


CASES = {
    "sgd": (server.sgd(RATE, 0.9), keras_sgd),
    "adam": (server.adam(RATE), keras_adam),
    "adagrad": (server.adagrad(RATE), keras_adagrad),
    "yogi": (server.yogi(RATE), experiments_yogi),
    "yogi-as-printed": (
        server.yogi(RATE, bias_correction=False),
        lambda deltas: reddi(lambda v, s: v - 0.01 * s * np.sign(v - s), deltas),
    ),
    "adam-as-printed": (
        server.adam(RATE, initial=1e-6, bias_correction=False),
        lambda deltas: reddi(lambda v, s: 0.99 * v + 0.01 * s, deltas),
    ),
    "adagrad-as-printed": (
        server.adagrad(RATE, tau=1e-3, b1=0.9, initial=1e-6),
        lambda deltas: reddi(lambda v, s: v + s, deltas),
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(deltas=arrays(5, 3), size=powers_of_two(-14, 7))
def test_equals_its_formula(name, deltas, size):
    """To the rounding of θ and of its steps, at most 32 times."""
    optimizer, formula = CASES[name]
    path = np.array([np.ones(3), *formula(size * deltas)])
    travelled = np.abs(np.diff(path, axis=0)).max(axis=1)
    rounding = 32 * np.finfo(np.float32).eps * (np.abs(path).max() + np.cumsum(travelled))
    for value, expected, atol in zip(
        run(optimizer, size * deltas), path[1:], rounding, strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("make", [server.adam, server.yogi])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bias_correction_has_the_parameters_precision(make, dtype):
    """β₂ near 1: in float32 1 − β₂ᵗ would keep three digits."""
    formula = {server.adam: keras_adam, server.yogi: experiments_yogi}[make]
    deltas = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32).astype(np.float64)
    with jax.enable_x64(dtype == np.float64):
        optimizer, theta = make(RATE, b2=0.9999), jnp.ones(3, dtype)
        state = optimizer.init(theta)
        for delta, expected in zip(deltas, formula(deltas, b2=0.9999), strict=True):
            updates, state = optimizer.update(jnp.asarray(delta, dtype), state, theta)
            theta = optax.apply_updates(theta, updates)
            assert theta.dtype == dtype
            np.testing.assert_allclose(theta, expected, rtol=2e-6 if dtype == np.float32 else 1e-11)


def test_optax_places_epsilon_elsewhere():
    """Why these are not optax's: at τ = 1e-3 and small deltas the two differ by far."""
    delta = np.full((1, 3), 1e-4, np.float32)
    with jax.numpy_dtype_promotion("standard"):
        theirs = run(optax.adam(RATE, b2=0.99, eps=1e-3), delta)[0]
    ours = run(server.adam(RATE), delta)[0]
    assert np.abs(1 - ours).max() < 0.2 * np.abs(1 - theirs).max()


def test_nothing_moves_on_zero_deltas():
    for optimizer in (server.adam(RATE, tau=0.0), server.adagrad(RATE, tau=0.0), server.yogi(RATE)):
        np.testing.assert_array_equal(run(optimizer, np.zeros((2, 3)))[-1], np.ones(3))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: server.sgd(0.0), "learning_rate = 0.0"),
        (lambda: server.adam(server.schedules.constant()), "learning_rate ="),
        (lambda: server.sgd(1.0, momentum=1.0), "momentum = 1.0"),
        (lambda: server.adam(1.0, b1=-0.1), "b1 = -0.1"),
        (lambda: server.adam(1.0, tau=float("nan")), "tau = nan"),
        (lambda: server.adagrad(1.0, initial=-1.0), "initial = -1.0"),
    ],
)
def test_bad_settings_are_refused(make, field):
    with refused(field):
        make()
