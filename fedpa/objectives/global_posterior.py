"""The exact global posterior: the product of local posteriors (Prop. 1), its mode (eq. 3, Prop. 2).

With mean-loss Hessians A_i and weights q_i = n_i, A = Σ q_i A_i / Σ q_i and μ = A⁻¹ Σ q_i A_i μ_i /
Σ q_i: each n_i counts once. At temperature 1 the precision n A = Σ n_i A_i is the product's.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.objectives.quadratic import Quadratic, minimizer


def global_posterior(
    clients: Sequence[Quadratic], weights: Sequence[float] | Float[Array, " N"] | None = None
) -> Quadratic:
    """Multiply the clients' posteriors. `weights` are q_i, n_i by default."""
    sizes = jnp.stack([client.n for client in clients])
    q = sizes if weights is None else jnp.asarray(weights, sizes.dtype)
    hessians = jnp.stack([client.hessian for client in clients])
    pulls = jnp.stack([client.hessian @ client.mean for client in clients])
    hessian = jnp.einsum("i,ijk->jk", q, hessians) / jnp.sum(q)
    linear = jnp.einsum("i,ij->j", q, pulls) / jnp.sum(q)
    return Quadratic(minimizer(hessian, linear), hessian, jnp.sum(sizes))
