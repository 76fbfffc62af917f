"""Jv for functions that only say how they are differentiated in reverse.

Layers of the bundled models have derivatives of their own (`jax.custom_vjp`), for which JAX has no
forward mode. u → Jᵀu is linear, and v → Jv is its transpose.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array


def linearize(
    function: Callable[[Any], Array], at: Any
) -> tuple[Array, Callable[[Any], Array], Callable[[Array], Any]]:
    """Linearize a function at a point, by reverse mode alone.

    Args:
        function: Of a pytree of arrays, to one array.
        at: The point.
    Returns:
        f, v → Jv, and u → Jᵀu.
    Example:
        >>> f, push, pull = linearize(lambda v: v**2, jnp.array([1.0, 3.0]))
        >>> push(jnp.ones(2)).tolist(), pull(jnp.ones(2)).tolist()
        ([2.0, 6.0], [2.0, 6.0])
    """
    f, pull = jax.vjp(function, at)

    def back(u: Array) -> Any:
        return pull(u)[0]

    def push(v: Any) -> Array:
        along: Array = jax.linear_transpose(back, f)(v)[0]
        return along

    return f, push, back
