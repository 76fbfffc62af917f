"""Shrinkage from ℓ×ℓ numbers against the equations transcribed densely."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.deltas import fixed, gram, oas, rblw
from fedpa.deltas.shrinkage import Moments, coefficients
from tests.deltas.dense import dense_delta


def chen_oas(s, n):
    """Chen et al. 2010, eq. 23."""
    p, tr, tr2 = len(s), np.trace(s), np.trace(s @ s)
    return min(((1 - 2 / p) * tr2 + tr**2) / ((n + 1 - 2 / p) * (tr2 - tr**2 / p)), 1)


def chen_rblw(s, n):
    """Chen et al. 2010, eq. 17."""
    p, tr, tr2 = len(s), np.trace(s), np.trace(s @ s)
    return min(((n - 2) / n * tr2 + tr**2) / ((n + 2) * (tr2 - tr**2 / p)), 1)


@given(
    seed=st.integers(0, 999),
    d=st.integers(2, 40),
    ell=st.integers(2, 30),
    rule=st.sampled_from(["oas", "rblw"]),
    target=st.sampled_from(["identity", "scaled"]),
    spread=st.floats(-3, 3),
)
def test_data_driven_rho_equals_the_dense_equations(seed, d, ell, rule, target, spread):
    rng = np.random.default_rng(seed)
    scales = 10.0**spread * np.exp(rng.standard_normal(d))
    samples, theta0 = scales * rng.standard_normal((ell, d)), rng.standard_normal(d)
    s = np.cov(samples.T).reshape(d, d)
    w = {"oas": chen_oas, "rblw": chen_rblw}[rule](s, ell)
    toward = np.eye(d) * (1.0 if target == "identity" else np.trace(s) / d)
    dense = np.linalg.solve(w * toward + (1 - w) * s, theta0 - samples.mean(0))
    value = fedpa.posterior_delta(theta0, samples, rule, target=target)
    np.testing.assert_allclose(value, dense, rtol=1e-6, atol=1e-9 * np.abs(dense).max())


@given(seed=st.integers(0, 999), rho=st.floats(0, 100), ell=st.integers(1, 12))
def test_fixed_rho_is_the_papers_estimator(seed, rho, ell):
    """Σ̂ = ρ_ℓ I + (1 − ρ_ℓ) Ŝ with ρ_ℓ = 1/(1 + (ℓ−1)ρ); Σ̂_1 = I."""
    rng = np.random.default_rng(seed)
    samples, theta0 = rng.standard_normal((ell, 4)), rng.standard_normal(4)
    weight = 1 / (1 + (ell - 1) * rho)
    s = np.cov(samples.T) if ell > 1 else np.zeros((4, 4))
    sigma = weight * np.eye(4) + (1 - weight) * s
    expected = np.linalg.solve(sigma, theta0 - samples.mean(0))
    np.testing.assert_allclose(fedpa.posterior_delta(theta0, samples, rho), expected, rtol=1e-7)
    np.testing.assert_allclose(dense_delta(theta0, samples, fixed(rho)), expected, rtol=1e-7)


def test_a_data_driven_weight_maps_back_to_rho():
    """The ρ that is reported gives the same delta when it is fixed."""
    rng = np.random.default_rng(0)
    samples, theta0 = rng.standard_normal((8, 20)), rng.standard_normal(20)
    value, rho, _ = gram.solve(theta0, samples, oas())
    assert rho > 0
    np.testing.assert_allclose(value, fedpa.posterior_delta(theta0, samples, rho), rtol=1e-9)


def test_known_value():
    """At d = 2, ℓ = 20, Chen et al.'s equation, not scikit-learn's simplification of it."""
    s = np.diag([2.0, 0.5])
    moments = Moments(np.trace(s), np.trace(s @ s), np.float64(20), 2)
    expected = 2.5**2 / (20 * (4.25 - 2.5**2 / 2))  # 1 − 2/p = 0
    assert coefficients(oas(), moments).a == pytest.approx(expected)


@pytest.mark.parametrize("estimator", [oas(), rblw(), oas("scaled"), rblw("scaled")])
@pytest.mark.parametrize("samples", [np.ones((1, 3)), np.ones((4, 3))], ids=["one", "equal"])
def test_nothing_to_estimate_means_identity(estimator, samples):
    value, rho, ess = gram.solve(np.full(3, 5.0), samples, estimator)
    np.testing.assert_allclose(value, 4.0)
    assert rho == 0.0
    assert ess == 1.0


def test_no_matrix_of_size_d_by_d():
    """A million parameters: a d×d matrix would take 4 TB."""
    rng = np.random.default_rng(0)
    theta0 = rng.standard_normal(10**6, dtype=np.float32)
    samples = rng.standard_normal((3, 10**6), dtype=np.float32)
    assert np.isfinite(fedpa.posterior_delta(theta0, samples, "oas")).all()
