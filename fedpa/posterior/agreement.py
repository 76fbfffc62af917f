"""Do clients agree? A client's site against what the prior and all others say, in their sds.

Client i's site says that η_i − Λ_iθ is 0 at θ, give or take: if θ is drawn of the posterior of the
others, N(m, S) with S = Σ_{−i}, the residual r = η_i − Λ_i m has mean 0 and covariance
Λ_i S Λ_i + Λ_i, so that rᵀ(Λ_i S Λ_i + Λ_i)⁺ r is χ² with as many degrees of freedom as Λ_i has
directions (Gaussian models; about that otherwise).
"""

import warnings
from typing import NamedTuple

import numpy as np
from jax.scipy.stats import chi2

from fedpa.posterior.posterior import Posterior
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.gaussian import Gaussian

SURPRISE = 0.001
"""The probability, among clients that agree, of a false warning about any of them."""
NEGLIGIBLE = 1e-6
"""Directions of Λ_i below this share of its largest say nothing."""


class Influence(NamedTuple):
    """What one client does to the posterior.

    Args:
        client: Its id.
        shift: By how many of its standard deviations the posterior's mean moves if the client is
            left out: the largest parameter's.
        sd_ratio: The largest ratio of a standard deviation without the client to that with it.
        distance: √χ²/dof of the client against the others: about 1 where they agree.
        p_value: The probability of a larger χ² if they agree.
    Example:
        >>> Influence("a", shift=0.4, sd_ratio=1.1, distance=3.2, p_value=0.6).client
        'a'
    """

    client: str
    shift: float
    sd_ratio: float
    distance: float
    p_value: float


def influence(posterior: Posterior) -> list[Influence]:
    """What each client does to the posterior, from its site; the largest shift first.

    Args:
        posterior: From `fedpa.infer` with method "ep" or "pvi".
    Returns:
        One entry per client.
    Raises:
        FedpaError: Clients keep no sites in this method.
    Example:
        >>> import fedpa
        >>> clients = {"a": np.zeros(5), "b": np.zeros(5), "large": np.full(90, 0.1)}
        >>> posterior = fedpa.infer(lambda mu, y: -0.5 * (y - mu) ** 2, np.zeros(()), clients,
        ...                         prior=fedpa.normal_prior(sd=9.0), method="pvi", progress=False)
        >>> influence(posterior)[0].client
        'large'
    """
    q = posterior.check_sites()
    rows = [_look_at(q, client, site) for client, site in posterior.sites.items()]
    return sorted(rows, key=lambda row: -row.shift)


def _look_at(q: Gaussian, client: str, site: Gaussian) -> Influence:
    matrix, other_matrix = _matrix(q), _matrix(q) - _matrix(site)
    eta = np.asarray(q.eta, np.float64)
    if np.linalg.eigvalsh(other_matrix)[0] <= 0:  # all that is known comes from this client
        return Influence(client, np.inf, np.inf, np.nan, 1.0)
    covariance, spread = np.linalg.inv(matrix), np.linalg.inv(other_matrix)
    sd = np.sqrt(np.diag(covariance))
    rest = spread @ (eta - np.asarray(site.eta, np.float64))
    shift = float(np.max(np.abs(rest - covariance @ eta) / sd))
    ratio = float(np.max(np.sqrt(np.diag(spread)) / sd))
    return Influence(client, shift, ratio, *_compare(site, rest, spread))


def _compare(site: Gaussian, mean: np.ndarray, spread: np.ndarray) -> tuple[float, float]:
    """√χ²/dof of a site against N(mean, spread), and its p-value."""
    matrix = _matrix(site)
    values, vectors = np.linalg.eigh(matrix)
    known = values > NEGLIGIBLE * max(values.max(), 0)
    if not known.any():
        return float("nan"), 1.0
    basis = vectors[:, known]
    residual = basis.T @ (np.asarray(site.eta, np.float64) - matrix @ mean)
    inside = basis.T @ matrix
    covariance = inside @ spread @ inside.T + np.diag(values[known])
    square, dof = float(residual @ np.linalg.solve(covariance, residual)), int(known.sum())
    return float(np.sqrt(square / dof)), float(chi2.sf(square, dof))


def _matrix(gaussian: Gaussian) -> np.ndarray:
    if isinstance(gaussian.precision, Diagonal):
        return np.diag(np.asarray(gaussian.precision.values, np.float64))
    return np.asarray(gaussian.precision.matrix, np.float64)


def warn_of_disagreement(posterior: Posterior) -> None:
    """Warn of clients that disagree with the others beyond their standard deviations."""
    if len(posterior.sites) < 2:
        return
    level = SURPRISE / len(posterior.sites)
    odd = [row for row in influence(posterior) if row.p_value < level]
    if odd:
        named = ", ".join(f"{row.client!r} ({row.distance:.1f}×)" for row in odd[:5])
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        warnings.warn(
            f"clients disagree with the others beyond their standard deviations: {named}{more}; "
            "one set of parameters may not describe all clients (fedpa.posterior.influence)",
            stacklevel=3,
        )
