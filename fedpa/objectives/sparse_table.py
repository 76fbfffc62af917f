"""A parameter that is a table of which a mini-batch reads a few rows: the vectors of its words.

The gradient with respect to such a table is 0 in every other row. Who says how the loss depends on
the rows alone lets local SGD leave the others untouched (`fedpa/samplers/sparse_step.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
from jaxtyping import Array, Inexact, Int

from fedpa.types import Examples, Loss, Params

Rows = Inexact[Array, "*ids d"]


class SparseTable(NamedTuple):
    """What makes `loss(θ, batch, key) = sparse.loss(gather_rows(sparse, θ, batch), batch, key)`."""

    table: Callable[[Any], Inexact[Array, "v d"]]
    """θ → the table, one of its leaves."""
    rows: Callable[[Examples], Int[Array, "*ids"]]
    """A batch → the numbers of the rows it reads, as often as it reads them, in any shape."""
    loss: Loss
    """The loss of parameters that have these rows, shape (*ids, d), in the table's place."""


def replace_table(sparse: SparseTable, theta: Params, leaf: Inexact[Array, "..."]) -> Params:
    """θ with `leaf` in the table's place."""
    return eqx.tree_at(sparse.table, theta, leaf)


def gather_rows(sparse: SparseTable, theta: Params, batch: Examples) -> Params:
    """θ with the rows that the batch reads in the table's place."""
    return replace_table(sparse, theta, sparse.table(theta)[sparse.rows(batch)])
