"""Low rank: as accurate as a dense solve, and made of what clients' products add up to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.precisions import Dense, LowRank, draw_directions, from_products
from tests.refusals import refused

D = 12


def clients(rng, ranks):
    """H_i, positive semidefinite, of the given ranks."""
    x = [rng.standard_normal((D, rank)) for rank in ranks]
    return [x_i @ x_i.T for x_i in x]


def approximate(matrices, s, dtype, seed=0):
    omega = draw_directions(jax.random.key(seed), D, s, dtype)
    products = [jnp.asarray(h, dtype) @ omega for h in matrices]
    return from_products(sum(products), omega, jnp.full(D, 0.5, dtype))


def matrix(precision):
    columns = np.asarray(precision.columns, np.float64)
    return np.diag(np.asarray(precision.diagonal, np.float64)) + columns @ columns.T


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("float64", 1e-10)])
@given(
    seed=st.integers(0, 2**31 - 1),
    ranks=st.sampled_from([(1,), (1, 2), (2, 2, 1), (0,)]),
    spread=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_products_of_clients_are_the_sum_where_their_rank_is_small(
    dtype, tolerance, seed, ranks, spread
):
    """Rank 5 at most, of 7 or 9 directions: those beyond the rank add nothing but accuracy."""
    total = spread * sum(clients(np.random.default_rng(seed), ranks))
    with jax.enable_x64(dtype == "float64"):
        for s in (7, 9):
            found = matrix(approximate([total], s, dtype, seed)) - 0.5 * np.eye(D)
            assert np.abs(found - total).max() <= tolerance * np.abs(total).max()


@given(seed=st.integers(0, 2**31 - 1))
def test_products_never_overstate_the_precision(seed):
    """0 ≤ UUᵀ ≤ H, also where H has full rank; more directions are nearer."""
    matrices = clients(np.random.default_rng(seed), (8, 9))
    total, errors = sum(matrices), []
    with jax.enable_x64(True):
        for s in (3, 8, D):
            found = matrix(approximate(matrices, s, "float64", seed)) - 0.5 * np.eye(D)
            assert np.linalg.eigvalsh(total - found).min() >= -1e-9 * np.abs(total).max()
            errors.append(np.linalg.norm(total - found))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] <= 1e-9 * np.linalg.norm(total)


def test_one_product_after_the_other_is_their_sum():
    matrices = clients(np.random.default_rng(0), (2, 1, 1))
    apart, whole = approximate(matrices, 5, "float32"), approximate([sum(matrices)], 5, "float32")
    np.testing.assert_allclose(matrix(apart), matrix(whole), atol=1e-4)


@pytest.mark.parametrize("steep", [1e2, 1e6])
def test_a_steep_precision_is_solved_as_accurately_as_a_dense_one(steep):
    """Woodbury's I + BᵀB loses the digits of what lies along U (here: all of it for 10⁶)."""
    rng = np.random.default_rng(0)
    columns = np.sqrt(steep) * rng.standard_normal((D, 3))
    precision = LowRank(jnp.ones(D), jnp.asarray(columns, jnp.float32))
    whole = matrix(precision)
    v = rng.standard_normal(D).astype(np.float32)
    wanted = np.linalg.solve(whole, v)
    errors = [
        np.linalg.norm(np.asarray(p.solve(jnp.asarray(v))) - wanted) / np.linalg.norm(wanted)
        for p in (precision, Dense(jnp.asarray(whole, jnp.float32)))
    ]
    assert errors[0] <= max(errors[1], 1e-6)


def test_no_more_directions_than_parameters():
    with refused("rank = 4"):
        draw_directions(jax.random.key(0), 3, 4)
