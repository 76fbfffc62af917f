"""A client's data set D_i as compiled programs see it: padded arrays and the true count n_i."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.errors import BadValueError, DataError, FedpaError
from fedpa.types import ClientArrays, Count, Examples


class ClientData(NamedTuple):
    """A client's examples D_i = {z_i1, …, z_in} in padded arrays (section 3).

    Args:
        examples: A pytree of arrays; rows from `n` on are padding, which no computation may read.
        n: n_i, the number of examples.
    Example:
        >>> data = fedpa.objectives.client_data({"x": np.ones((3, 2))}, capacity=4)
        >>> data.examples["x"].shape, int(data.n)
        ((4, 2), 3)
    """

    examples: Examples
    n: Count


class Kind(NamedTuple):
    """What a client's arrays are, beside their length."""

    structure: Any
    arrays: tuple[tuple[tuple[int, ...], Any], ...]
    """Shape of one example, and dtype."""

    def __str__(self) -> str:
        named = [f"{dtype.name}{list(shape)}" for shape, dtype in self.arrays]
        return str(jax.tree.unflatten(self.structure, named))


def is_real(dtype: Any) -> bool:
    """Whether JAX computes with it, as real numbers: not text, dates, objects, complex or wider."""
    if jnp.issubdtype(dtype, jnp.integer):
        return bool(dtype.kind != "m")  # NumPy counts spans of time among the integers
    floating = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 8
    return bool(floating or dtype == np.bool_)


def find_misfit(leaf: Any) -> str | None:
    """What keeps a leaf from being an array of real numbers; None if nothing does."""
    if not hasattr(leaf, "shape"):
        kind = type(leaf).__name__
        return f"is a {kind}: must be an array (numpy.asarray makes one of a list)"
    dtype = (leaf if isinstance(leaf, np.ndarray | jax.Array) else np.asarray(leaf)).dtype
    if not is_real(dtype):
        real = "real " if jnp.issubdtype(dtype, jnp.complexfloating) else ""
        return f"is of type {dtype}: must be {real}numbers that JAX has"
    if isinstance(leaf, np.ma.MaskedArray):
        return "is a masked array: must be plain, without missing values"
    return None


def find_bad_value(array: np.ndarray) -> tuple[list[int], str] | None:
    """The first value that is not finite, or not one of the dtype that JAX has for the array's.

    Returns its index and what it must be; None if all are good.
    """
    kept = jax.dtypes.canonicalize_dtype(array.dtype)  # without x64, int64 is int32
    if kept == array.dtype:
        if not jnp.issubdtype(kept, jnp.floating):
            return None
        good = np.isfinite(array)
    else:
        of_kind = jnp.finfo if jnp.issubdtype(kept, jnp.floating) else jnp.iinfo
        least, most = (np.asarray(limit).item() for limit in (of_kind(kept).min, of_kind(kept).max))
        good = (array >= least) & (array <= most)  # NaN is neither
    if good.all():
        return None
    place = np.unravel_index(np.argmin(good), good.shape)
    expected = "must be a finite number"
    if np.isfinite(array[place]):
        expected = (
            f"must be from {least} to {most} (JAX has {array.dtype} as {kept} unless "
            "jax_enable_x64 is on)"
        )
    return [int(i) for i in place], expected


def column_name(structure: Any, place: int) -> str:
    """The name of the leaf at a place of a tree."""
    paths = jax.tree_util.tree_leaves_with_path(
        jax.tree.unflatten(structure, range(structure.num_leaves))
    )
    return jax.tree_util.keystr(paths[place][0], simple=True, separator=".") or "array"


def check_examples(
    examples: Any, where: Callable[[int | None], str]
) -> tuple[list[np.ndarray], Kind]:
    """One client's arrays, and of which kind they are, if JAX can have them as they are.

    Refuses what is not an array of real numbers, arrays of unequal length, values that are not
    finite or beyond what JAX has for their dtype.

    where: (row, or None for all of them) → how a message begins: file, client.
    """
    leaves, structure = jax.tree.flatten(examples)
    arrays = []
    for place, leaf in enumerate(leaves):
        misfit = find_misfit(leaf)
        if misfit is not None:
            raise DataError(f"{where(None)}: {column_name(structure, place)} {misfit}")
        array = np.asarray(leaf)
        swapped = not array.dtype.isnative  # JAX has no arrays of the other byte order
        arrays.append(array.astype(array.dtype.newbyteorder("=")) if swapped else array)
    try:
        kind = kind_of(arrays, structure)
    except FedpaError as error:
        raise DataError(f"{where(None)}: {error}") from None
    for place, array in enumerate(arrays):
        bad = find_bad_value(array)
        if bad is not None:
            index, expected = bad
            value = f"{column_name(structure, place)}{index} = {array[tuple(index)]}"
            raise BadValueError(f"{where(index[0])}: {value}: {expected}")
    return arrays, kind


def kind_of(arrays: Sequence[np.ndarray], structure: Any) -> Kind:
    if not arrays or any(not a.ndim or len(a) != len(arrays[0]) for a in arrays):
        num_rows(list(arrays))  # says what is wrong
    # As JAX will have them: without x64, float64 is float32.
    return Kind(
        structure,
        tuple((a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays),
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


def client_data(examples: ClientArrays, capacity: int | None = None) -> ClientData:
    """Make a `ClientData` of arrays, padded with zeros.

    Args:
        examples: A pytree of arrays of real numbers with one leading axis in common.
        capacity: Rows of the padded arrays; default: the number of examples, at least 1.
    Returns:
        The client's data, as samplers take it.
    Raises:
        DataError: An array can't be used, or a value is not finite; names column and row.
    Example:
        >>> client_data({"x": np.ones((3, 2)), "y": np.ones(3)}).n.item()
        3
    """
    arrays, kind = check_examples(examples, lambda row: "examples")
    n = len(arrays[0])
    capacity = max(n, 1) if capacity is None else capacity

    def pad(array: np.ndarray) -> Array:
        missing = [(0, capacity - n)] + [(0, 0)] * (array.ndim - 1)
        return jnp.asarray(np.pad(array, missing) if capacity > n else array)

    padded = jax.tree.unflatten(kind.structure, map(pad, arrays))
    return ClientData(padded, jnp.asarray(n, jnp.int32))


def example_weights(data: ClientData) -> Float[Array, " capacity"]:
    """1 for each of the n_i examples, 0 for padding."""
    capacity = jax.tree.leaves(data.examples)[0].shape[0]
    return (jnp.arange(capacity, dtype=jnp.int32) < data.n).astype(jnp.float32)
