"""Noise is standard normal from either source, and correlated noise is what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpa.privacy import draw_normals, draw_system_normals, make_bands
from fedpa.privacy.noise import band_norm, correlate, draw_system_uniforms, no_noises
from tests.strategies import arrays

LIKE = {"w": jnp.zeros((50, 41)), "b": jnp.zeros(7), "n": jnp.zeros(())}
DRAWS = {"keys": lambda: draw_normals(jax.random.key(0), LIKE), "system": None}


@pytest.mark.parametrize("source", ["keys", "system"])
def test_normals_are_standard_and_independent(source):
    """Of the operating system the test fails by chance once in a million runs."""
    draw = (
        draw_system_normals(LIKE) if source == "system" else draw_normals(jax.random.key(0), LIKE)
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), draw) == jax.tree.map(
        lambda x: (x.shape, x.dtype), LIKE
    )
    values = np.concatenate([np.ravel(x) for x in jax.tree.leaves(draw)])
    assert stats.kstest(values, "norm").pvalue > 1e-6
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(len(values))


def test_the_system_never_repeats_itself():
    one, other = draw_system_normals(LIKE["w"]), draw_system_normals(LIKE["w"])
    assert not np.equal(one, other).any()
    numbers = draw_system_uniforms(10_000)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert stats.kstest(numbers, "uniform").pvalue > 1e-6


def toeplitz(bands, rounds):
    matrix = np.zeros((rounds, rounds))
    for k, c in enumerate(bands):
        matrix += np.diag(np.full(rounds - k, c), -k) if k < rounds else 0
    return matrix


def test_all_bands_are_the_square_root_of_prefix_sums():
    root = toeplitz(make_bands(12), 12)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((12, 12))), atol=1e-12)


@given(fresh=arrays(9, 2), number=st.integers(1, 5))
def test_correlated_noise_solves_the_banded_system(fresh, number):
    bands = make_bands(number)
    kept, noises = no_noises(jnp.zeros(2), bands), []
    for row in fresh:
        noise = correlate(jnp.asarray(row, jnp.float32), kept, bands)
        kept = (noise, *kept)[: number - 1]
        noises.append(np.asarray(noise))
    np.testing.assert_allclose(toeplitz(bands, 9) @ np.array(noises), fresh, atol=1e-4)


@given(gaps=st.lists(st.integers(0, 3), min_size=1, max_size=5), number=st.integers(1, 4))
def test_rounds_far_enough_apart_are_orthogonal(gaps, number):
    """k rounds of a client, at least b apart, move Cx by at most √k ‖c‖, whatever their signs."""
    bands = make_bands(number)
    rounds = np.cumsum([0, *(number + gap for gap in gaps)])
    moved = np.zeros(rounds[-1] + number)
    moved[rounds] = (-1.0) ** np.arange(len(rounds))
    length = np.linalg.norm(toeplitz(bands, len(moved)) @ moved)
    assert length <= np.sqrt(len(rounds)) * band_norm(bands) + 1e-9


def test_the_sum_of_correlated_noise_is_smaller():
    """The model is the sum of all rounds: what DP-FTRL is for."""
    rounds, bands = 32, make_bands(8)
    prefix, inverse = np.tril(np.ones((rounds, rounds))), np.linalg.inv(toeplitz(bands, rounds))
    correlated = band_norm(bands) * np.linalg.norm((prefix @ inverse)[-1])
    assert correlated < 0.75 * np.sqrt(rounds)
