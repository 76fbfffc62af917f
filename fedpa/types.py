"""The few types every layer shares, with array shapes in them (jaxtyping)."""

from collections.abc import Callable
from typing import Any, TypeAlias

from jaxtyping import Array, Float, Inexact, Int, PRNGKeyArray, PyTree, Shaped
from jaxtyping import Key as KeyArray

Model: TypeAlias = PyTree
"""A model as its author has it, any pytree: its floating-point arrays are what is trained."""

Params: TypeAlias = PyTree[Inexact[Array, "..."]]
"""θ: a pytree whose leaves are all floating-point arrays."""

Examples: TypeAlias = PyTree[Shaped[Array, "n ..."]]
"""A client's or a batch's examples: a pytree of arrays with one leading axis in common."""

Key: TypeAlias = PRNGKeyArray
Keys: TypeAlias = KeyArray[Array, " m"]
Scalar = Float[Array, ""]
Count = Int[Array, ""]
Losses = Inexact[Array, " b"]

Loss = Callable[[Any, Examples, Key], Losses]
"""`loss(params, batch, key)`: one number per example of the batch."""

Regularizer = Callable[[Any], Inexact[Array, ""]]
