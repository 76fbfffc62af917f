import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.objectives import (
    Quadratic,
    client_data,
    global_posterior,
    least_squares,
    quadratic,
)
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from tests.compiling import run_in_two_threads
from tests.federations import least_squares_federation, posterior
from tests.refusals import refused
from tests.strategies import arrays, regressions

OBJECTIVE = Objective(least_squares.loss)
# Compiled once for each dimension; eagerly every operation would be a program of its own.
GRADIENT = jax.jit(lambda theta, data, key: jax.grad(client_loss, 1)(OBJECTIVE, theta, data, key))
DELTA, COVARIANCE, PRECISION, PRODUCT = map(
    jax.jit, (quadratic.delta, quadratic.covariance, quadratic.precision, global_posterior)
)


def problem(seed, n, d):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((n, d)).astype(np.float32),
        "y": rng.standard_normal(n).astype(np.float32),
    }


DIMS = st.sampled_from([1, 2, 4])


@given(DIMS.flatmap(lambda d: st.tuples(regressions(8, d), arrays(d))))
def test_delta_is_the_gradient_of_the_mean_loss(case):
    """A(θ − μ) = ∇f(θ), singular A (n < d) included; to the rounding of A μ."""
    examples, theta = case
    with jax.enable_x64(True):
        data = client_data(examples, 8)
        gradient = GRADIENT(theta, data, jax.random.key(0))
        q = posterior(data)
        size = np.linalg.norm(q.hessian) * np.linalg.norm(np.asarray(theta) - q.mean)
        np.testing.assert_allclose(DELTA(q, theta), gradient, rtol=0, atol=1e-13 * size + 1e-12)


@given(DIMS.flatmap(lambda d: regressions(8, d)))
def test_covariance_is_the_pseudo_inverse(examples):
    """To the rounding of an inverse: ε·cond(A)·‖A⁺‖."""
    with jax.enable_x64(True):
        q = posterior(client_data(examples, 8))
        inverse = np.linalg.pinv(q.hessian, hermitian=True, rcond=1e-12)
        size = np.linalg.norm(inverse, 2)
        rounding = 50 * np.finfo(float).eps * size * np.linalg.norm(q.hessian, 2) * size
        n = len(examples["y"])
        np.testing.assert_allclose(COVARIANCE(q, 2.0) * n / 2, inverse, rtol=0, atol=rounding)


def test_temperature_n_gives_the_inverse_hessian(x64):
    examples = {k: v.astype(np.float64) for k, v in problem(0, 30, 4).items()}
    q = least_squares.posterior(client_data(examples))
    np.testing.assert_allclose(quadratic.covariance(q, q.n) @ q.hessian, np.eye(4), atol=1e-10)
    np.testing.assert_allclose(
        quadratic.precision(q) @ quadratic.covariance(q), np.eye(4), atol=1e-10
    )


def test_padding_changes_nothing():
    examples = problem(3, 7, 3)
    plain, padded = (least_squares.posterior(client_data(examples, c)) for c in (7, 32))
    np.testing.assert_allclose(plain.mean, padded.mean, rtol=1e-5)
    np.testing.assert_allclose(plain.hessian, padded.hessian, rtol=1e-5)
    assert float(padded.n) == 7


def test_ridge_makes_a_singular_posterior_proper():
    data = client_data(problem(0, 3, 6))
    assert np.linalg.matrix_rank(least_squares.posterior(data).hessian) == 3
    assert np.linalg.eigvalsh(least_squares.posterior(data, ridge=0.5).hessian).min() > 0.49


def test_draws_have_the_mean_and_covariance():
    q = Quadratic(jnp.array([1.0, -2.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]]), jnp.array(10.0))
    draws = np.asarray(quadratic.draw(q, jax.random.key(0), 40_000, temperature=5.0))
    expected = np.asarray(quadratic.covariance(q, 5.0))
    np.testing.assert_allclose(draws.mean(0), q.mean, atol=5 * np.sqrt(expected.max() / 40_000))
    np.testing.assert_allclose(np.cov(draws.T), expected, atol=0.03 * expected.max())


@given(st.lists(regressions(5, 3), min_size=3, max_size=3))
def test_global_posterior_is_that_of_the_pooled_data(clients):
    """Props. 1 and 2: multiplying local posteriors gives the posterior of all the data."""
    with jax.enable_x64(True):
        local = [posterior(client_data(c, 5)) for c in clients]
        product = PRODUCT(local)
        pooled = jax.tree.map(lambda *parts: np.concatenate(parts), *clients)
        central = posterior(client_data(pooled, 15))
        precision = np.asarray(PRECISION(central))
        size = np.linalg.norm(precision, 2)
        condition = size * np.linalg.norm(np.linalg.pinv(precision, hermitian=True, rcond=1e-12), 2)
        means = np.abs([product.mean, central.mean, *(q.mean for q in local)]).max()
        rounding = 100 * np.finfo(float).eps
        np.testing.assert_allclose(PRECISION(product), precision, rtol=0, atol=rounding * size)
        np.testing.assert_allclose(
            product.mean, central.mean, rtol=0, atol=rounding * condition * means
        )
        assert float(product.n) == len(pooled["y"])
        # Prop. 2: the gradient of Q vanishes at the mode.
        pull = sum(float(q.n) * np.asarray(DELTA(q, product.mean)) for q in local)
        np.testing.assert_allclose(pull, 0.0, atol=rounding * condition * size * means)


def test_global_posterior_takes_other_weights():
    _, local, _ = least_squares_federation()
    one = global_posterior(local, weights=[1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(one.mean, local[0].mean, rtol=1e-4)


def test_an_empty_client_is_a_flat_quadratic():
    empty = ClientData({"x": jnp.zeros((4, 2)), "y": jnp.zeros(4)}, jnp.asarray(0))
    q = least_squares.posterior(empty)
    assert float(q.n) == 0
    assert not np.asarray(q.hessian).any()


@pytest.mark.parametrize("theta", [[0.0, 0.0], [3.0, -1.0]])
def test_value_is_the_excess_loss(theta):
    data = client_data(problem(5, 20, 2))
    q, objective = least_squares.posterior(data), Objective(least_squares.loss)
    at = lambda t: client_loss(objective, t, data, jax.random.key(0))  # noqa: E731
    excess = at(jnp.array(theta)) - at(q.mean)
    np.testing.assert_allclose(quadratic.value(q, jnp.array(theta)), excess, rtol=1e-4, atol=1e-6)


PLAIN = Quadratic(jnp.zeros(2), jnp.eye(2), jnp.array(3.0))


@pytest.mark.parametrize(
    ("clients", "weights", "field"),
    [
        ({"a": PLAIN}, None, "clients ="),
        ([], None, "clients = []"),
        (PLAIN, None, "clients ="),
        ([PLAIN, {"mean": 0}], None, "clients[1] ="),
        ([PLAIN, PLAIN._replace(mean=jnp.zeros(3))], None, "clients[1]"),
        ([PLAIN, PLAIN], [1.0], "weights = [1.0]"),
        ([PLAIN, PLAIN], [1.0, -1.0], "weights = [1.0, -1.0]"),
        ([PLAIN, PLAIN], [0.0, 0.0], "weights = [0.0, 0.0]"),
        ([PLAIN, PLAIN], {"a": 1.0}, "weights ="),
    ],
)
def test_what_is_no_federation_of_quadratics_is_refused(clients, weights, field):
    with refused(field):
        global_posterior(clients, weights)


def test_programs_in_two_threads_do_not_wait_for_each_other():
    """Batched LAPACK calls did, for ever."""
    run_in_two_threads(
        """
from fedpa.objectives.quadratic import minimizer

x = rng.standard_normal((16, 40, 30))
hessians = jnp.asarray(x.transpose(0, 2, 1) @ x, jnp.float32)
linear = jnp.asarray(rng.standard_normal((16, 30)), jnp.float32)
calls = [functools.partial(jax.jit(jax.vmap(minimizer)), hessians, linear)]
"""
    )
