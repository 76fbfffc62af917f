"""Sums, means and linear algebra use at least float32, whatever the type of the parameters.

A bfloat16 counter stops at 256 and a float16 sum of weights overflows at 65,504. Only parameters
that are sent and stored have their own dtype.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float


def accumulation_dtype(dtype: Any) -> Any:
    """float32, or the dtype itself if it is wider."""
    return np.promote_types(dtype, np.float32)


def widen(tree: Any) -> Any:
    """Cast every array of the tree to its accumulation dtype."""
    return jax.tree.map(lambda x: jnp.asarray(x).astype(accumulation_dtype(x.dtype)), tree)


def narrow(tree: Any, like: Any) -> Any:
    """Cast every array of the tree to the dtype of its place in `like`."""
    return jax.tree.map(lambda x, target: x.astype(target.dtype), tree, like)


def ravel(tree: Any) -> tuple[Float[Array, " d"], Callable[[Array], Any]]:
    """All arrays of the tree as one wide vector, and the function vector → tree, of its dtypes."""
    vector, unravel = ravel_pytree(widen(tree))
    return vector, lambda v: narrow(unravel(v), tree)
