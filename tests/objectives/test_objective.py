import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.objectives import Objective, client_data, laplace, least_squares, log_posterior
from fedpa.objectives.checks import check_loss
from fedpa.objectives.layer_inputs import per_example
from fedpa.objectives.minibatches import (
    Minibatch,
    batch_in_order,
    batch_with_replacement,
    epoch_order,
    steps_per_epoch,
)
from fedpa.objectives.objective import client_loss, minibatch_loss
from tests.refusals import refused

KEY = jax.random.key(0)
ORDER, BATCH_IN_ORDER = jax.jit(epoch_order), jax.jit(batch_in_order, static_argnums=3)


def rows(n):
    return {"x": np.arange(n, dtype=np.float32)}


@given(n=st.integers(0, 40), seed=st.integers(0, 99))
def test_an_epoch_visits_every_example_once_whatever_the_padding(n, seed):
    key, size = jax.random.key(seed), 7
    seen = {}
    for capacity in (40, 90):
        data = client_data(rows(n), capacity)
        order = ORDER(data, key)
        steps = int(steps_per_epoch(data.n, size))
        assert steps == -(-n // size)
        batches = [BATCH_IN_ORDER(data, order, jnp.asarray(i), size) for i in range(steps)]
        seen[capacity] = [
            float(x)
            for b in jax.device_get(batches)
            for x, w in zip(b.examples["x"], b.weights, strict=True)
            if w > 0
        ]
        assert sorted(seen[capacity]) == list(range(n))
    assert len({tuple(order) for order in seen.values()}) == 1


def test_epochs_are_shuffled_evenly():
    """The first example of an epoch is uniform: a χ² test at fixed seeds."""
    data = client_data(rows(8), 64)
    keys = jax.random.split(jax.random.key(1), 4000)
    first = np.asarray(jax.jit(jax.vmap(lambda k: epoch_order(data, k)[0]))(keys))
    observed = np.bincount(first, minlength=8)
    assert len(observed) == 8
    assert ((observed - 500) ** 2 / 500).sum() < 24.3  # 99.9 % of χ² with 7 degrees of freedom


def test_draws_with_replacement_are_real_examples():
    data = client_data({"x": np.arange(1, 6, dtype=np.float32)}, 64)
    batch = batch_with_replacement(data, KEY, 200)
    assert set(np.asarray(batch.examples["x"])) == {1, 2, 3, 4, 5}


def test_reductions():
    objective = Objective(lambda theta, batch, key: theta * batch["x"])
    batch = Minibatch({"x": jnp.array([1.0, 2.0, 100.0])}, jnp.array([1.0, 1.0, 0.0]))
    theta = jnp.asarray(2.0)
    assert float(minibatch_loss(objective, theta, batch, KEY)) == 3.0
    assert float(minibatch_loss(objective._replace(reduction="sum"), theta, batch, KEY)) == 6.0
    regularized = objective._replace(regularizer=lambda theta: 10 * theta)
    assert float(minibatch_loss(regularized, theta, batch, KEY)) == 23.0
    data = client_data({"x": np.array([1, 2, 3], np.float32)}, 8)
    assert float(client_loss(regularized, theta, data, KEY)) == 24.0


def test_padding_never_poisons_a_gradient():
    """log(0) on a padded row would give 0 · ∞."""
    objective = Objective(lambda theta, batch, key: jnp.log(batch["x"] * theta))
    data = client_data({"x": np.array([1, 2, 3], np.float32)}, 8)
    gradient = jax.jit(lambda theta: jax.grad(client_loss, 1)(objective, theta, data, KEY))(
        jnp.asarray(2.0)
    )
    np.testing.assert_allclose(gradient, 0.5, rtol=1e-6)


def test_log_posterior_scales_with_n_over_temperature():
    data = client_data({"x": np.ones((5, 1), np.float32), "y": np.zeros(5, np.float32)}, 16)
    objective = Objective(least_squares.loss)
    theta = jnp.array([2.0])  # f = 2
    for temperature, expected in [(1.0, -10.0), (5.0, -2.0)]:
        value = log_posterior(objective, theta, data, temperature, KEY)
        assert float(value) == pytest.approx(expected)


def test_per_example_wraps_a_batch_loss():
    def scalar(theta, batch, key):
        return jnp.mean((batch["x"] * theta - 1.0) ** 2)

    loss = per_example(scalar)
    batch = {"x": jnp.arange(4.0)}
    expected = (jnp.arange(4.0) * 3.0 - 1.0) ** 2
    np.testing.assert_allclose(loss(jnp.asarray(3.0), batch, KEY), expected)
    check_loss(Objective(loss), jnp.asarray(3.0), batch)


@pytest.mark.parametrize(
    ("loss", "field"),
    [
        (lambda p, b, k: jnp.mean(b["x"]), "loss"),
        (lambda p, b, k: b["x"][:, None] * p, "loss"),
        (lambda p, b, k: p * jnp.ones(3), "loss"),
        (lambda p, b, k: (b["x"], b["x"]), "loss"),
    ],
)
def test_a_loss_of_another_shape_is_refused(loss, field):
    with refused(field):
        check_loss(Objective(loss), jnp.asarray(1.0), rows(4))


def test_bad_reduction_and_regularizer_are_refused():
    good = Objective(lambda p, b, k: b["x"] * p)
    with refused("regularizer", "(3,)"):
        check_loss(good._replace(regularizer=lambda p: jnp.ones(3)), jnp.asarray(1.0), rows(4))
    with refused("reduction = 'median'"):
        check_loss(good._replace(reduction="median"), jnp.asarray(1.0), rows(4))


def test_laplace_is_exact_on_least_squares():
    rng = np.random.default_rng(0)
    examples = {"x": rng.standard_normal((9, 3)), "y": rng.standard_normal(9)}
    data = client_data(jax.tree.map(lambda a: a.astype(np.float32), examples), 16)
    exact = least_squares.posterior(data)
    approximate = jax.jit(lambda mode: laplace(Objective(least_squares.loss), data, mode, KEY))(
        exact.mean
    )
    np.testing.assert_allclose(approximate.hessian, exact.hessian, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(approximate.mean, exact.mean)
    assert float(approximate.n) == 9


def test_laplace_of_a_small_classifier():
    """Logistic regression with two classes: H = mean of p(1 − p) x xᵀ."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 2)).astype(np.float32)
    data = client_data({"x": x, "y": (x[:, 0] > 0).astype(np.float32)}, 32)

    def loss(params, batch, key):
        logit = batch["x"] @ params["w"] + params["b"]
        return jnp.logaddexp(0.0, logit) - batch["y"] * logit

    mode = {"w": jnp.array([0.3, -0.2]), "b": jnp.asarray(0.1)}
    q = jax.jit(lambda mode: laplace(Objective(loss), data, mode, KEY))(mode)
    design = np.concatenate([np.ones((20, 1)), x], axis=1)  # tree order: b, then w
    p = 1 / (1 + np.exp(-(design @ np.array([0.1, 0.3, -0.2]))))
    expected = (design * (p * (1 - p))[:, None]).T @ design / 20
    np.testing.assert_allclose(q.hessian, expected, rtol=1e-4)


def test_weights_make_a_mean_over_words_of_means_over_sentences():
    """`weight` counts an example so often, in mini-batches and in f_i; padding not at all."""
    words = jnp.asarray([3.0, 0.0, 1.0, 7.0])
    batch = Minibatch(
        {"l": jnp.asarray([1.0, 9.0, 2.0, 100.0]), "w": words}, jnp.asarray([1.0, 1, 1, 0])
    )
    objective = Objective(lambda theta, batch, key: theta * batch["l"], weight=lambda b: b["w"])
    theta, key = jnp.asarray(2.0), jax.random.key(0)
    assert float(minibatch_loss(objective, theta, batch, key)) == pytest.approx(2 * (3 + 2) / 4)
    summed = objective._replace(reduction="sum")
    assert float(minibatch_loss(summed, theta, batch, key)) == pytest.approx(2 * (3 + 2))
    data = client_data(batch.examples)._replace(n=jnp.asarray(3, jnp.int32))
    assert float(client_loss(objective, theta, data, key)) == pytest.approx(2 * (3 + 2) / 4)
    nothing = batch._replace(weights=jnp.zeros(4))
    assert float(minibatch_loss(objective, theta, nothing, key)) == 0


def test_a_weight_of_another_shape_is_refused():
    objective = Objective(lambda theta, batch, key: theta * batch["l"], weight=lambda b: 1.0)
    with refused("weight", "()"):
        check_loss(objective, jnp.asarray(2.0), {"l": jnp.ones(3)})
