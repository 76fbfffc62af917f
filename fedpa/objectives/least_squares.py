"""Federated least squares, eq. 2: f(θ; x, y) = ½ (xᵀθ − y)², whose posterior is exactly Gaussian.

With the mean loss, A_i = X_iᵀX_i / n_i and μ_i solves A_i μ = X_iᵀy_i / n_i. (Eq. 2 drops the 1/n;
with Σ⁻¹ = XᵀX *and* weights q_i ∝ n_i the size of a client would count twice.)

`make_regression` generates federations of such problems as scikit-learn's function of that name
does one: designs are Gaussian, labels X w_i + noise. How hard the federation is follows from its
arguments: label noise (which alone decides how far posterior samples spread), the rank of the
design, how far the clients' optima lie apart, and how much their designs differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedpa.errors import refuse
from fedpa.objectives.client_data import ClientData, example_weights
from fedpa.objectives.layer_inputs import layer_input, layer_output
from fedpa.objectives.quadratic import Quadratic, Vector, minimizer
from fedpa.types import Examples, Key, Losses, Scalar


def loss(theta: Vector, batch: Examples, key: Key) -> Losses:
    """Compute f(θ; x, y) = ½ (xᵀθ − y)² of every example (eq. 2).

    Args:
        theta: θ, shape (d,).
        batch: {"x": (b, d), "y": (b,)}.
        key: Not used: the loss is not random.
    Returns:
        Shape (b,).
    Example:
        >>> batch = {"x": jnp.eye(2), "y": jnp.array([1.0, 3.0])}
        >>> print(loss(jnp.ones(2), batch, jax.random.key(0)))
        [0. 2.]
    """
    del key
    residuals: Losses = layer_output(layer_input(batch["x"], theta) @ theta, theta) - batch["y"]
    return 0.5 * residuals**2


def posterior(data: ClientData, ridge: float | Scalar = 0.0) -> Quadratic:
    """Compute the client's exact quadratic: A_i = X_iᵀX_i/n_i + λI, μ_i = A_i⁺ X_iᵀy_i/n_i.

    Args:
        data: From `fedpa.objectives.client_data`, with "x" and "y".
        ridge: λ ≥ 0, adds ½ λ ‖θ‖² to the mean loss; default: 0.
    Returns:
        The quadratic of the mean loss.
    Example:
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> np.asarray(posterior(data).mean).round(3).tolist()
        [1.0, 3.0]
    """
    x, y = data.examples["x"], data.examples["y"]
    n = jnp.maximum(data.n, 1).astype(x.dtype)
    weights = example_weights(data).astype(x.dtype)
    weighted = x * weights[:, None]
    hessian = weighted.T @ x / n + ridge * jnp.eye(x.shape[1], dtype=x.dtype)
    return Quadratic(minimizer(hessian, weighted.T @ y / n), hessian, data.n.astype(x.dtype))


class Federation(NamedTuple):
    """Clients with least-squares problems, from `make_regression`.

    Args:
        clients: client id → {"x": (n_i, d), "y": (n_i,)}, float32.
        optima: (clients, d): the w_i that made the labels.
    Example:
        >>> fedpa.objectives.make_regression(0, sizes=[5, 8], dim=3).optima.shape
        (2, 3)
    """

    clients: dict[str, dict[str, np.ndarray]]
    optima: np.ndarray


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
    """Generate a federation of least-squares problems, y = X_i w_i + noise.

    Args:
        seed: Of all randomness.
        sizes: n_i of each client.
        dim: d ≥ 1.
        noise: Standard deviation ≥ 0 of the labels around X w_i; default: 1 (scikit-learn's is 0).
        rank: Of every design matrix, 1 to `dim`; default: `dim`. Below `dim` the A_i are singular,
            with a row space of their own per client.
        heterogeneity: Standard deviation ≥ 0 of the w_i around a common w, per coordinate; default:
            1. 0 gives all clients the same optimum.
        skew: The designs' covariances have eigenvalues spread log-uniformly over [e^−skew, e^skew]
            in a random basis per client, ≥ 0; default: 1. 0 makes them all white.
        signal: Standard deviation of the common w, per coordinate; default: 1.
    Returns:
        The clients' arrays and their optima w_i.
    Example:
        >>> federation = make_regression(0, sizes=[5, 8], dim=3)
        >>> {name: arrays["x"].shape for name, arrays in federation.clients.items()}
        {'client-0000': (5, 3), 'client-0001': (8, 3)}
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
