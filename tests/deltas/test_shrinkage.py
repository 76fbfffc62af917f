"""Shrinkage from ℓ×ℓ numbers against the equations transcribed densely."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.deltas import fixed, gram, oas, rblw
from fedpa.deltas.shrinkage import Moments, coefficients
from tests.deltas.dense import dense_delta
from tests.strategies import powers_of_two, starts_and_samples


def chen_oas(s, n):
    """Chen et al. 2010, eq. 23."""
    p, tr, tr2 = len(s), np.trace(s), np.trace(s @ s)
    return ratio((1 - 2 / p) * tr2 + tr**2, (n + 1 - 2 / p) * (tr2 - tr**2 / p))


def chen_rblw(s, n):
    """Chen et al. 2010, eq. 17."""
    p, tr, tr2 = len(s), np.trace(s), np.trace(s @ s)
    return ratio((n - 2) / n * tr2 + tr**2, (n + 2) * (tr2 - tr**2 / p))


def ratio(above, below):
    """At most 1; 1 where Ŝ is a multiple of I already."""
    return min(above / below, 1.0) if below > 0 else 1.0


def covariance(samples):
    ell, d = samples.shape
    return np.cov(samples.T).reshape(d, d) if ell > 1 else np.zeros((d, d))


def assert_solves(value, sigma, theta0, samples):
    """Σ̂ Δ̂ = θ₀ − x̄, to the rounding of a dense solve: ε·cond(Σ̂) of Δ̂ and of θ₀ − x̄'s parts."""
    expected = np.linalg.solve(sigma, theta0 - samples.mean(0))
    rounding = 50 * np.finfo(float).eps * np.linalg.cond(sigma)
    parts = np.linalg.norm(theta0) + np.linalg.norm(samples, axis=1).max()
    allowed = rounding * (np.linalg.norm(expected) + parts / np.linalg.norm(sigma, 2))
    assert np.linalg.norm(value - expected) <= allowed


@given(
    problem=starts_and_samples(),
    rule=st.sampled_from(["oas", "rblw"]),
    target=st.sampled_from(["identity", "scaled"]),
)
def test_data_driven_rho_equals_the_dense_equations(problem, rule, target):
    theta0, samples = problem
    s = covariance(samples)
    spread = np.trace(s) / len(s)
    w = {"oas": chen_oas, "rblw": chen_rblw}[rule](s, len(samples))
    toward = np.eye(len(s)) * (spread if target == "scaled" and spread > 0 else 1.0)
    value = fedpa.posterior_delta(theta0, samples, rule, target=target)
    assert_solves(value, w * toward + (1 - w) * s, theta0, samples)


@given(problem=starts_and_samples(), rho=st.just(0.0) | powers_of_two(-10, 7))
def test_fixed_rho_is_the_papers_estimator(problem, rho):
    """Σ̂ = ρ_ℓ I + (1 − ρ_ℓ) Ŝ with ρ_ℓ = 1/(1 + (ℓ−1)ρ); Σ̂_1 = I."""
    theta0, samples = problem
    weight = 1 / (1 + (len(samples) - 1) * rho)
    sigma = weight * np.eye(len(theta0)) + (1 - weight) * covariance(samples)
    assert_solves(fedpa.posterior_delta(theta0, samples, rho), sigma, theta0, samples)
    assert_solves(dense_delta(theta0, samples, fixed(rho)), sigma, theta0, samples)


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
