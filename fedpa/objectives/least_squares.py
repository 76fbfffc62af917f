"""Federated least squares, eq. 2: f(θ; x, y) = ½ (xᵀθ − y)², whose posterior is exactly Gaussian.

With the mean loss, A_i = X_iᵀX_i / n_i and μ_i solves A_i μ = X_iᵀy_i / n_i. (Eq. 2 drops the 1/n;
with Σ⁻¹ = XᵀX *and* weights q_i ∝ n_i the size of a client would count twice.)
"""

import jax.numpy as jnp

from fedpa.objectives.client_data import ClientData, example_weights
from fedpa.objectives.layer_inputs import layer_input
from fedpa.objectives.quadratic import Quadratic, Vector, minimizer
from fedpa.types import Examples, Key, Losses, Scalar


def loss(theta: Vector, batch: Examples, key: Key) -> Losses:
    """½ (xᵀθ − y)² per example; a batch is {"x": (b, d), "y": (b,)}."""
    del key
    return 0.5 * (layer_input(batch["x"], theta) @ theta - batch["y"]) ** 2


def posterior(data: ClientData, ridge: float | Scalar = 0.0) -> Quadratic:
    """The client's exact quadratic. `ridge` λ adds ½ λ ‖θ‖² to the mean loss."""
    x, y = data.examples["x"], data.examples["y"]
    n = jnp.maximum(data.n, 1).astype(x.dtype)
    weights = example_weights(data).astype(x.dtype)
    weighted = x * weights[:, None]
    hessian = weighted.T @ x / n + ridge * jnp.eye(x.shape[1], dtype=x.dtype)
    return Quadratic(minimizer(hessian, weighted.T @ y / n), hessian, data.n.astype(x.dtype))
