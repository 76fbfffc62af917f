"""The Laplace approximation of a client's posterior at a given mode (section 3): an O(d²) oracle.

N(θ*, (T/n) H⁻¹) with H the Hessian of the mean loss at θ*. For small models only.
"""

import jax
from jax.flatten_util import ravel_pytree

from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective, client_loss
from fedpa.objectives.quadratic import Quadratic
from fedpa.types import Key, Params


def laplace(objective: Objective, data: ClientData, mode: Params, key: Key) -> Quadratic:
    """The quadratic of f_i at `mode`, over the parameters ravelled in tree order."""
    flat, unravel = ravel_pytree(mode)

    def flat_loss(vector: jax.Array) -> jax.Array:
        return client_loss(objective, unravel(vector), data, key)

    hessian = jax.hessian(flat_loss)(flat)
    return Quadratic(flat, 0.5 * (hessian + hessian.T), data.n.astype(flat.dtype))
