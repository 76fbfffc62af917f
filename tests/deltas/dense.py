"""The dense O(d³) oracle, for tests and tiny problems: Σ̂ formed and solved with in float64."""

import numpy as np

from fedpa.deltas.shrinkage import Moments, Shrinkage, coefficients


def covariance(samples: np.ndarray, shrink: Shrinkage, scale: float = 1.0) -> np.ndarray:
    """Σ̂ of the rows of `samples`, float64."""
    x = np.asarray(samples, np.float64)
    ell, dim = x.shape
    deviations = scale * (x - x.mean(0))
    s = deviations.T @ deviations / max(ell - 1, 1)
    moments = Moments(np.trace(s), np.trace(s @ s), np.float64(ell), dim)
    a, r, _ = coefficients(shrink, moments)
    return a * (np.eye(dim) + r * s)


def dense_delta(
    theta0: np.ndarray, samples: np.ndarray, shrink: Shrinkage, scale: float = 1.0
) -> np.ndarray:
    """Δ̂ = Σ̂⁻¹ (θ₀ − x̄), float64."""
    x = np.asarray(samples, np.float64)
    return np.linalg.solve(covariance(x, shrink, scale), np.asarray(theta0, np.float64) - x.mean(0))
