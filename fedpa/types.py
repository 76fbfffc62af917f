"""The few types every layer shares, with array shapes in them (jaxtyping)."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Float, Inexact, Int, PRNGKeyArray, PyTree, Shaped
from jaxtyping import Key as KeyArray

Model: TypeAlias = PyTree
"""A model as its author has it, any pytree: its floating-point arrays are what is trained."""

Params: TypeAlias = PyTree[Inexact[Array, "..."]]
"""θ: a pytree whose leaves are all floating-point arrays."""

Examples: TypeAlias = PyTree[Shaped[Array, "n ..."]]
"""A client's or a batch's examples: a pytree of arrays with one leading axis in common."""

ClientArrays: TypeAlias = PyTree[Array | np.ndarray]
"""A client's examples as they are read: a pytree of NumPy or JAX arrays, as in `Examples`."""

Key: TypeAlias = PRNGKeyArray
"""A random key, as `jax.random.key(0)` gives it."""
Keys: TypeAlias = KeyArray[Array, " m"]
"""Several keys on one axis, as `jax.random.split` gives them."""
Scalar = Float[Array, ""]
"""A floating-point number."""
Count = Int[Array, ""]
"""A whole number."""
Losses = Inexact[Array, " b"]
"""One number per example of a batch."""

Loss = Callable[[Model, Examples, Key], Losses]
"""`loss(params, batch, key)`: one number per example of the batch."""

Regularizer = Callable[[Model], Inexact[Array, ""]]
"""`regularizer(params)`: a number that is added to the mean loss."""
