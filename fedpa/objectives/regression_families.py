"""Federations of least-squares problems, generated as scikit-learn's `make_regression` does one.

A client's design is Gaussian, its labels X w_i + noise. How hard the federation is follows from
the arguments: label noise (which alone decides how far posterior samples spread), the rank of the
design, how far the clients' optima lie apart, and how much their designs differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedpa.errors import refuse


class Federation(NamedTuple):
    clients: dict[str, dict[str, np.ndarray]]
    """client id → {"x": (n_i, d), "y": (n_i,)}, float32."""
    optima: np.ndarray
    """(clients, d): the w_i that made the labels."""


def make_regression(
    seed: int,
    *,
    sizes: Sequence[int],
    dim: int,
    noise: float = 1.0,
    rank: int | None = None,
    heterogeneity: float = 1.0,
    skew: float = 1.0,
    signal: float = 1.0,
) -> Federation:
    """One client for each of `sizes`.

    noise: standard deviation of the labels around X w_i (scikit-learn's default is 0).
    rank: of every design matrix; `dim` by default. Below `dim` the A_i are singular, with a row
        space of their own per client.
    heterogeneity: standard deviation of the w_i around a common w, per coordinate; 0 gives all
        clients the same optimum.
    skew: the designs' covariances have eigenvalues spread log-uniformly over [e^−skew, e^skew] in
        a random basis per client; 0 makes them all white.
    signal: standard deviation of the common w, per coordinate.
    """
    if rank is not None and not 1 <= rank <= dim:
        raise refuse("rank", rank, f"must be between 1 and dim = {dim}")
    for name, value in [("noise", noise), ("heterogeneity", heterogeneity), ("skew", skew)]:
        if not (np.isfinite(value) and value >= 0):
            raise refuse(name, value, "must be a finite number ≥ 0")
    rng = np.random.default_rng(seed)
    common = signal * rng.standard_normal(dim)
    clients, optima = {}, []
    for index, size in enumerate(sizes):
        basis, _ = np.linalg.qr(rng.standard_normal((dim, dim)))
        scales = np.exp(0.5 * rng.uniform(-skew, skew, dim))
        if rank is not None:
            scales[rank:] = 0.0
        x = (rng.standard_normal((size, dim)) * scales) @ basis.T
        optimum = common + heterogeneity * rng.standard_normal(dim)
        y = x @ optimum + noise * rng.standard_normal(size)
        clients[f"client-{index:04d}"] = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
        optima.append(optimum)
    return Federation(clients, np.array(optima))
