"""A client's data set D_i as compiled programs see it: padded arrays and the true count n_i."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.errors import FedpaError
from fedpa.types import Count, Examples


class ClientData(NamedTuple):
    """D_i = {z_i1, …, z_in}. Rows from `n` on are padding, which no computation reads."""

    examples: Examples
    n: Count


class Packed(NamedTuple):
    """Many clients' examples one after the other, so that those of a block are taken at once."""

    load: Callable[[str], Any]
    """The function by which single clients are read; with another one, this is out of date."""
    structure: Any
    arrays: Sequence[np.ndarray]
    start: Mapping[str, int]
    """id → its first row."""
    sizes: Mapping[str, int]


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


def at_home(arrays: Any, start: Any, n: Count, capacity: int) -> ClientData:
    """One resident client's data: its rows, padded by repeating the last."""
    rows = start + jnp.minimum(jnp.arange(capacity, dtype=jnp.int32), jnp.maximum(n - 1, 0))
    # An empty client at the very end begins where there is nothing.
    rows = jnp.minimum(rows, jax.tree.leaves(arrays)[0].shape[0] - 1)
    return ClientData(jax.tree.map(lambda array: array[rows], arrays), n)


def packed(load: Callable[[str], Any], ids: Sequence[str]) -> Packed:
    """Pack the examples of all clients, which must be of one kind."""
    leaves, structures = zip(*[jax.tree.flatten(load(name)) for name in ids], strict=True)
    sizes = [len(arrays[0]) for arrays in leaves]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).tolist()
    together = [np.concatenate(arrays) for arrays in zip(*leaves, strict=True)]
    return Packed(
        load,
        structures[0],
        together,
        dict(zip(ids, starts, strict=True)),
        dict(zip(ids, sizes, strict=True)),
    )


def num_rows(examples: Any) -> int:
    """The common length of the leading axis of `examples`."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(examples)]
    if not shapes:
        raise FedpaError("examples have no arrays: give at least one array with a leading axis")
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        raise FedpaError(
            f"examples have arrays of shapes {shapes}: all must have first axes of one length"
        )
    return int(shapes[0][0])


def client_data(examples: Any, capacity: int | None = None) -> ClientData:
    """Pad `examples` on the host to `capacity` rows (their own number, at least 1, by default)."""
    n = num_rows(examples)
    capacity = max(n, 1) if capacity is None else capacity

    def pad(array: Any) -> Array:
        xp = jnp if isinstance(array, jax.core.Tracer) else np
        array = xp.asarray(array)
        missing = [(0, capacity - n)] + [(0, 0)] * (array.ndim - 1)
        return jnp.asarray(xp.pad(array, missing) if capacity > n else array)

    return ClientData(jax.tree.map(pad, examples), jnp.asarray(n, jnp.int32))


def example_weights(data: ClientData) -> Float[Array, " capacity"]:
    """1 for each of the n_i examples, 0 for padding."""
    capacity = jax.tree.leaves(data.examples)[0].shape[0]
    return (jnp.arange(capacity, dtype=jnp.int32) < data.n).astype(jnp.float32)
