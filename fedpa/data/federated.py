"""Federated data: client ids, examples per client, one client's arrays by id. Read lazily."""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from fedpa.engines.engine import Packed
from fedpa.errors import DataError, FedpaError
from fedpa.objectives.client_data import Kind, check_examples, find_bad_value, is_real
from fedpa.types import ClientArrays

PACKED_UP_TO = 2**28
"""Bytes of examples up to which a packed copy of them is kept: rounds of many small clients begin
sooner."""
CHECKED_AT_ONCE = 2**24
"""Bytes of examples that are looked through at a time where no packed copy is made."""


def _name_client(name: str, row: int | None = None) -> str:
    return f"client {name!r}"


class FederatedData(NamedTuple):
    """Examples by client: ids, sizes, and a function that reads one client.

    Args:
        ids: Text, each once.
        num_examples: id → n_i.
        examples: id → a pytree of arrays with one leading axis in common.
        packed: All examples in few arrays, where they are in memory (default: None).
        locate: (id, one of its rows or None) → where that is, as messages begin: file, client
            (default: the client).
    Example:
        >>> arrays = {"a": np.zeros((3, 2)), "b": np.ones((5, 2))}
        >>> data = fedpa.data.FederatedData(
        ...     ["a", "b"], lambda name: len(arrays[name]), lambda name: {"x": arrays[name]}
        ... )
        >>> data.num_examples("b"), data.examples("b")["x"].shape
        (5, (5, 2))
    """

    ids: Sequence[str]
    num_examples: Callable[[str], int]
    examples: Callable[[str], ClientArrays]
    packed: Packed | None = None
    locate: Callable[[str, int | None], str] = _name_client


Clients: TypeAlias = Mapping[Any, ClientArrays] | FederatedData
"""Client id → a pytree of arrays whose first axis counts examples; or a federation that is read
lazily."""


class Splits(NamedTuple):
    """The federations of one data set.

    Args:
        train: The clients that train.
        validation: The clients by which settings are chosen; None where the data set has none.
        test: The clients on which the result is measured.
    Example:
        >>> data = fedpa.data.from_mapping({"a": {"x": np.zeros((3, 2))}})
        >>> fedpa.data.Splits(train=data, validation=None, test=data).train.ids
        ['a']
    """

    train: FederatedData
    validation: FederatedData | None
    test: FederatedData


def check_when_read(data: FederatedData) -> FederatedData:
    """The federation with every client checked as it is read, as `from_mapping` checks them.

    A client whose arrays can't be used, or are not like those of the client that was read first,
    raises a DataError that names source, client, column and row.
    """
    if data.packed is not None and data.packed.load == data.examples:
        return data  # `from_mapping` has looked at them
    first: dict[None, tuple[str, Kind]] = {}

    def examples(name: str) -> Any:
        arrays, kind = check_examples(data.examples(name), lambda row: data.locate(name, row))
        other, usual = first.setdefault(None, (name, kind))
        if kind != usual:
            raise DataError(
                f"{data.locate(name, None)} has arrays {kind}, client {other!r} has "
                f"{usual}: all must have the same"
            )
        return jax.tree.unflatten(kind.structure, arrays)

    return data._replace(examples=examples, packed=None)


def as_federation(clients: Clients, field: str = "clients") -> FederatedData:
    """Convert the user's clients to a federation; refuses an empty one."""
    data = clients if isinstance(clients, FederatedData) else from_mapping(clients)
    if not data.ids:
        raise FedpaError(f"{field} has no clients: at least one is needed")
    return data


def from_mapping(clients: Mapping[Any, ClientArrays]) -> FederatedData:
    """Make a federation of arrays in memory. All of them are checked here, before any work starts.

    Args:
        clients: Client id → a pytree of arrays with one leading axis in common. All clients have
            the same structure, shapes and dtypes. Ids are taken as text and sorted, so the order
            of the mapping does not matter.
    Returns:
        The federation; up to 256 MB of examples are also kept packed, for faster rounds.
    Raises:
        FedpaError: A client's arrays can't be used, or differ from the others'; names the client.
    Example:
        >>> data = from_mapping({7: {"x": np.zeros((3, 2))}, 12: {"x": np.ones((5, 2))}})
        >>> data.ids, data.num_examples("7")
        (['12', '7'], 3)
    """
    _check_mapping(clients)
    ids, keys = _sort(clients)
    # There may be a million: what is done for each client is done in C, as far as that goes, and
    # the client to name is looked for when it is known that there is one.
    flat = _flatten(clients, keys)
    if flat is None:
        raise _blame(clients, ids, keys)
    columns, sizes, structure = flat
    if not sizes.any():
        raise FedpaError("clients have no examples: at least one client needs one")
    start = np.cumsum(sizes) - sizes
    row_bytes = list(map(_row_bytes, columns))
    arrays = None
    if int(sizes.sum()) * sum(row_bytes) <= PACKED_UP_TO:
        arrays = list(map(np.concatenate, columns))
    blocks = arrays or itertools.chain.from_iterable(
        _blocks(column, start * size) for column, size in zip(columns, row_bytes, strict=True)
    )
    if any(find_bad_value(block) is not None for block in blocks):
        raise _blame(clients, ids, keys)
    position = {name: place for place, name in enumerate(ids)}

    def num_examples(name: str) -> int:
        return int(sizes[position[name]])

    def examples(name: str) -> Any:
        place = position[name]
        if arrays is None:
            return jax.tree.unflatten(structure, [column[place] for column in columns])
        rows = slice(start[place], start[place] + sizes[place])
        return jax.tree.unflatten(structure, [array[rows] for array in arrays])

    if arrays is None:
        return FederatedData(ids, num_examples, examples)
    columns.clear()  # the packed copy is enough
    pack = Packed(examples, structure, arrays, position, start, sizes)
    return FederatedData(ids, num_examples, examples, pack)


def _check_mapping(clients: object) -> None:
    if not isinstance(clients, Mapping):
        raise FedpaError(
            f"clients is a {type(clients).__name__}: must be a mapping of client id to arrays "
            f"({_advise(clients)})"
        )
    if not clients:
        raise FedpaError("clients is empty: give at least one client id with its arrays")


def _advise(clients: object) -> str:
    """How a mapping, or a federation, is made of something else."""
    if hasattr(clients, "column_names") and hasattr(clients, "with_format"):
        return "fedpa.data.readers.open_huggingface(dataset, column) reads a data set"
    if hasattr(clients, "columns"):
        return "fedpa.data.readers.open_table(df, column) reads a table with a column of client ids"
    if isinstance(clients, str) or hasattr(clients, "__fspath__"):
        return "fedpa.data.readers has open_table(path, column), open_hdf5(path) and others"
    return "dict(enumerate(clients)) makes one of a list"


def _sort(clients: Mapping[Any, Any]) -> tuple[list[str], Sequence[Any]]:
    """The ids as text, sorted, and the key of each in the mapping."""
    if set(map(type, clients)) == {str}:
        ids = sorted(clients)
        return ids, ids
    by_id = {str(key): key for key in clients}
    if len(by_id) != len(clients):
        raise FedpaError("clients has ids that are the same as text: ids must differ as text")
    ids = sorted(by_id)
    return ids, [by_id[name] for name in ids]


def _flatten(
    clients: Mapping[Any, Any], keys: Sequence[Any]
) -> tuple[list[list[np.ndarray]], np.ndarray, Any] | None:
    """Each leaf's arrays client by client, the clients' sizes, and their trees' structure.

    None if arrays are not of numbers, or not of one kind, or not of one length in every client.
    """
    flatten: Any = jax.tree_util.tree_flatten
    leaves, structure = flatten(clients[keys[0]])
    leaves.clear()
    for key in keys:
        own, its = flatten(clients[key])
        if its != structure:
            return None
        leaves += own
    columns, sizes = [], None
    for place in range(structure.num_leaves):
        column = _as_numpy(leaves[place :: structure.num_leaves])
        if column is None:
            return None
        dtypes, shapes = set(map(_DTYPE, column)), set(map(_SHAPE, column))
        if not all(map(is_real, dtypes)) or () in shapes or len({s[1:] for s in shapes}) > 1:
            return None
        if not all(dtype.isnative for dtype in dtypes):
            column = [array.astype(array.dtype.newbyteorder("=")) for array in column]
        if len({jax.dtypes.canonicalize_dtype(d.newbyteorder("=")) for d in dtypes}) > 1:
            return None
        lengths = np.fromiter(map(len, column), np.int64, len(column))
        if sizes is not None and not np.array_equal(sizes, lengths):
            return None
        columns.append(column)
        sizes = lengths
    return None if sizes is None else (columns, sizes, structure)


_DTYPE, _SHAPE = operator.attrgetter("dtype"), operator.attrgetter("shape")


def _as_numpy(column: list[Any]) -> list[np.ndarray] | None:
    kinds = set(map(type, column))
    if any(not hasattr(kind, "shape") or issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        return None
    if all(issubclass(kind, np.ndarray) for kind in kinds):
        return column
    try:
        return list(map(np.asarray, column))
    except TypeError:  # keys of random numbers
        return None


def _blame(clients: Mapping[Any, Any], ids: Sequence[str], keys: Sequence[Any]) -> FedpaError:
    """The error that names the client whose arrays can't be used, or are unlike the others'."""
    kinds = {}
    for name, key in zip(ids, keys, strict=True):
        try:
            _, own = check_examples(clients[key], functools.partial(_name_client, name))
        except FedpaError as error:
            return error
        kinds[name] = str(own)
    # What most clients have is right; one that differs is named, wherever it stands.
    usual, _ = Counter(kinds.values()).most_common(1)[0]
    name, kind = next(item for item in kinds.items() if item[1] != usual)
    return FedpaError(f"client {name!r} has arrays {kind}: the others have {usual}")


def _row_bytes(column: Sequence[np.ndarray]) -> int:
    """Of one example, in a packed copy."""
    widest: int = max(dtype.itemsize for dtype in set(map(_DTYPE, column)))
    return int(np.prod(column[0].shape[1:])) * widest


def _blocks(column: Sequence[np.ndarray], start: np.ndarray) -> Iterator[np.ndarray]:
    """The arrays of the next few clients as one, a few megabytes each. start: in bytes."""
    edges = np.flatnonzero(np.diff(start // CHECKED_AT_ONCE)) + 1
    for first, last in itertools.pairwise([0, *edges.tolist(), len(column)]):
        yield column[first] if last - first == 1 else np.concatenate(column[first:last])
