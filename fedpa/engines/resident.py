"""Clients' examples packed in few arrays, which an engine moves to its device once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.objectives.client_data import ClientData


class Packed(NamedTuple):
    """Many clients' examples one after the other, so that those of a block are taken at once."""

    load: Callable[[str], Any]
    """The function by which single clients are read; with another one, this is out of date."""
    structure: Any
    arrays: Sequence[np.ndarray]
    position: Mapping[str, int]
    """id → its place in the two that follow."""
    start: np.ndarray
    """The first row of each client."""
    sizes: np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Resident:
    """Clients whose examples are on the device already, in the rows of arrays that all share."""

    arrays: Any
    start: Any
    """The first row of each client."""
    n: Any
    capacity: int = dataclasses.field(metadata={"static": True})
    """Rows that are read of each, n of them its own."""


def read_client(data: ClientData | Resident) -> ClientData:
    """One client's data; a resident client's are its rows, padded by repeating the last."""
    if isinstance(data, ClientData):
        return data
    offsets = jnp.arange(data.capacity, dtype=jnp.int32)
    rows = data.start + jnp.minimum(offsets, jnp.maximum(data.n - 1, 0))
    # An empty client at the very end begins where there is nothing.
    rows = jnp.minimum(rows, jax.tree.leaves(data.arrays)[0].shape[0] - 1)
    return ClientData(jax.tree.map(lambda array: array[rows], data.arrays), data.n)


def map_lanes(function: Callable[[Any], Any], data: ClientData | Resident) -> Any:
    """Apply `function` to every array that has an entry for each client."""
    if isinstance(data, Resident):
        return dataclasses.replace(data, start=function(data.start), n=function(data.n))
    return jax.tree.map(function, data)


def lane_axes(data: ClientData | Resident) -> Any:
    """`in_axes` of the data of several clients: the arrays they share have no axis for them."""
    if isinstance(data, Resident):
        return Resident(None, 0, 0, data.capacity)
    return 0
