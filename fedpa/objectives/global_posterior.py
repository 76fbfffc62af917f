"""The exact global posterior: the product of local posteriors (Prop. 1), its mode (eq. 3, Prop. 2).

With mean-loss Hessians A_i and weights q_i = n_i, A = Σ q_i A_i / Σ q_i and μ = A⁻¹ Σ q_i A_i μ_i /
Σ q_i: each n_i counts once. At temperature 1 the precision n A = Σ n_i A_i is the product's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, check_type, refuse
from fedpa.objectives.quadratic import Quadratic, minimizer


def global_posterior(clients: Any, weights: Any = None) -> Quadratic:
    """Multiply the clients' posteriors.

    Args:
        clients: A sequence of `Quadratic`, one per client, all of one dimension.
        weights: q_i ≥ 0, one per client; default: n_i.
    Returns:
        The `Quadratic` whose mean is the mode of the global posterior.
    Raises:
        FedpaError: For other clients, or weights that don't fit them.
    """
    _check_clients(clients)
    sizes = jnp.stack([jnp.asarray(client.n) for client in clients])
    q = sizes if weights is None else _checked_weights(weights, len(clients)).astype(sizes.dtype)
    hessians = jnp.stack([client.hessian for client in clients])
    pulls = jnp.stack([client.hessian @ client.mean for client in clients])
    hessian = jnp.einsum("i,ijk->jk", q, hessians) / jnp.sum(q)
    linear = jnp.einsum("i,ij->j", q, pulls) / jnp.sum(q)
    return Quadratic(minimizer(hessian, linear), hessian, jnp.sum(sizes))


def _check_clients(clients: Any) -> None:
    example = "fedpa.objectives.least_squares.posterior(data)"
    if isinstance(clients, Quadratic) or not isinstance(clients, Sequence) or not clients:
        raise refuse("clients", clients, f"must be a list of Quadratic, each as of {example}")
    for index, client in enumerate(clients):
        check_type(f"clients[{index}]", client, Quadratic, example)
        dim = np.shape(clients[0].mean)
        shapes = np.shape(client.mean), np.shape(client.hessian), np.shape(client.n)
        if len(dim) != 1 or shapes != (dim, dim * 2, ()):
            raise FedpaError(
                f"clients[{index}] has mean, hessian and n of shapes {shapes}: must be "
                "((d,), (d, d), ()), with one d for all clients"
            )


def _checked_weights(weights: Any, count: int) -> jax.Array:
    expected = f"must be {count} numbers ≥ 0, one per client, not all 0"
    try:
        q = jnp.asarray(weights)
    except (TypeError, ValueError):
        raise refuse("weights", weights, expected) from None
    if q.shape != (count,) or not (jnp.issubdtype(q.dtype, jnp.number)):
        raise refuse("weights", weights, expected)
    if not isinstance(q, jax.core.Tracer):
        values = np.asarray(q, np.float64)
        if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
            raise refuse("weights", weights, expected)
    return q
