"""ESS of AR(1) chains, whose effective sample size is known."""

import numpy as np
import pytest

from fedpa.deltas import gram
from fedpa.deltas.shrinkage import fixed


def ess(samples):
    return gram.solve(np.zeros(samples.shape[1]), samples, fixed(0.1)).ess


def autoregressive(phi, ell, dim, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.standard_normal(dim)]
    for _ in range(ell - 1):
        rows.append(phi * rows[-1] + np.sqrt(1 - phi**2) * rng.standard_normal(dim))
    return np.array(rows)


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_an_autoregressive_chain_is_worth_what_theory_says(phi):
    ell = 400
    expected = ell * (1 - phi) / (1 + phi)
    assert ess(autoregressive(phi, ell, dim=500)) == pytest.approx(expected, rel=0.03)


def test_few_independent_samples_count_in_full_and_a_path_as_one():
    assert ess(autoregressive(0.0, 5, dim=20_000)) == pytest.approx(5, rel=0.03)
    path = np.outer(np.arange(5.0), np.ones(10))
    assert ess(path) == 1


def test_it_is_of_the_samples_and_not_of_their_place_or_size():
    samples = autoregressive(0.5, 8, dim=50)
    assert ess(7 + 3 * samples) == pytest.approx(ess(samples))


def test_alternating_samples_count_as_no_more_than_they_are():
    assert ess(np.outer((-1.0) ** np.arange(6), np.ones(4))) == 6
