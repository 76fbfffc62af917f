"""The interface of deltas: what a client computes from its posterior samples and sends.

A delta is online and any-time: `value` may be read after every `update` and is the result on the
samples seen so far.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from fedpa.errors import refuse
from fedpa.objectives.checks import check_like
from fedpa.precision import accumulation_dtype
from fedpa.types import Count, Params, Scalar

State: TypeAlias = PyTree


class DeltaInfo(NamedTuple):
    """Diagnostics of a client's delta, for reports.

    Args:
        rho: The ρ in use; 0 where Σ̂ = I.
        ess: How many independent samples the samples are worth; 0 where none are used.
    Example:
        >>> fedpa.deltas.DeltaInfo(rho=jnp.float32(0.1), ess=jnp.float32(5.0)).ess.item()
        5.0
    """

    rho: Scalar
    ess: Scalar


class Delta(NamedTuple):
    """What a client sends, from its posterior samples as they come (eq. 4).

    Three pure functions. A sample that equals θ₀ must give Δ = 0.

    Args:
        init: (θ₀, n_i) → state.
        update: (state, θ_s, θ_k) → state: a new sample, and the chain's iterate when it was drawn.
        value: state → (Δ, info), after at least one update.
    Example:
        >>> delta = fedpa.deltas.mean()
        >>> state = delta.init(jnp.zeros(2), jnp.asarray(10))
        >>> state = delta.update(state, jnp.ones(2), jnp.ones(2))
        >>> print(delta.value(state)[0])
        [-1. -1.]
    """

    init: Callable[[Params, Count], State]
    update: Callable[[State, Params, Params], State]
    value: Callable[[State], tuple[Params, DeltaInfo]]


def check_value(value: Any, theta0: Params) -> tuple[Params, DeltaInfo]:
    """Call `Delta.value`, and check the form of its result while it is traced."""
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], DeltaInfo)):
        raise refuse("delta.value's answer", value, "must be (Δ, fedpa.deltas.DeltaInfo(rho, ess))")
    check_like("delta.value's Δ", value[0], theta0)
    return value[0], value[1]


def ravel(tree: Params) -> Float[Array, " d"]:
    """Flatten a tree to one vector of at least float32."""
    flat, _ = ravel_pytree(tree)
    return flat.astype(accumulation_dtype(flat.dtype))


def unravel(delta: Float[Array, " d"], theta0: Params, known: Any) -> Params:
    """Reshape Δ to θ₀'s structure and dtypes; NaN if it is not `known`."""
    flat, restore = ravel_pytree(theta0)
    return restore(jnp.where(known, delta, jnp.nan).astype(flat.dtype))
