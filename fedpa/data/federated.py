"""Federated data: client ids, examples per client, one client's arrays by id. Read lazily."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError
from fedpa.objectives.client_data import Packed, num_rows, packed

PACKED_UP_TO = 2**28
"""Bytes of examples up to which a packed copy of them is kept: rounds of many small clients begin
sooner."""


class FederatedData(NamedTuple):
    ids: Sequence[str]
    """Text, each once."""
    num_examples: Callable[[str], int]
    examples: Callable[[str], Any]
    """id → a pytree of arrays with one leading axis in common."""
    packed: Packed | None = None
    """All examples in few arrays, where they are in memory."""


class Splits(NamedTuple):
    """The federations of one data set."""

    train: FederatedData
    validation: FederatedData | None
    """Who decides what is chosen; None where the data set has none."""
    test: FederatedData


def mapped(
    data: FederatedData, function: Callable[[str, Any], Any], most: int | None = None
) -> FederatedData:
    """`function(id, examples)` of every client's examples, when they are read.

    most: the first so many examples of a client are taken, no more.
    """

    def num_examples(name: str) -> int:
        n = data.num_examples(name)
        return n if most is None else min(n, most)

    def examples(name: str) -> Any:
        raw = data.examples(name)
        if most is not None:
            raw = jax.tree.map(lambda array: array[:most], raw)
        return function(name, raw)

    return FederatedData(data.ids, num_examples, examples)


def from_mapping(clients: Any) -> FederatedData:
    """Arrays in memory by client id. All of them are checked here, before any work starts.

    The order of the mapping does not matter: ids are taken as text and sorted.
    """
    if not isinstance(clients, Mapping):
        raise FedpaError(
            f"clients is a {type(clients).__name__}: must be a mapping of client id to arrays "
            "(dict(enumerate(clients)) makes one of a list)"
        )
    if not clients:
        raise FedpaError("clients is empty: give at least one client id with its arrays")
    by_id = {str(name): name for name in clients}
    if len(by_id) != len(clients):
        raise FedpaError("clients has ids that are the same as text: ids must differ as text")
    ids = sorted(by_id)
    for name in ids:
        _check_kinds(name, clients[by_id[name]])
    arrays = {name: jax.tree.map(np.asarray, clients[by_id[name]]) for name in ids}
    _check(arrays)
    counts = {name: num_rows(tree) for name, tree in arrays.items()}
    if not any(counts.values()):
        raise FedpaError("clients have no examples: at least one client needs one")
    read = arrays.__getitem__
    size = sum(leaf.nbytes for tree in arrays.values() for leaf in jax.tree.leaves(tree))
    together = packed(read, ids) if size <= PACKED_UP_TO else None
    return FederatedData(ids, counts.__getitem__, read, together)


def _check_kinds(name: str, tree: Any) -> None:
    """Every leaf must be an array of numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, np.ndarray | jax.Array):
            raise FedpaError(
                f"client {name!r}: {_where(path)} is a {type(leaf).__name__}: must be an array "
                "(numpy.asarray makes one of a list)"
            )
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool):
            raise FedpaError(
                f"client {name!r}: {_where(path)} is of type {leaf.dtype}: must be numbers"
            )


def _check(arrays: Mapping[str, Any]) -> None:
    shapes = {}
    for name, tree in arrays.items():
        try:
            num_rows(tree)
        except FedpaError as error:
            raise FedpaError(f"client {name!r}: {error}") from None
        shapes[name] = str(jax.tree.map(_shape_and_type, tree))
    # What most clients have is right; one that differs is named, wherever it stands.
    usual, _ = Counter(shapes.values()).most_common(1)[0]
    for name, shape in shapes.items():
        if shape != usual:
            raise FedpaError(f"client {name!r} has arrays {shape}: the others have {usual}")
    for name, tree in arrays.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not np.isfinite(leaf).all():
                bad = np.argwhere(~np.isfinite(leaf))[0]
                raise FedpaError(
                    f"client {name!r}: {_where(path)}{bad.tolist()} = {leaf[tuple(bad)]}: must be "
                    "a finite number"
                )


def _shape_and_type(array: np.ndarray) -> str:
    """An example's shape and dtype, the dtype as JAX will have it."""
    return f"{jax.dtypes.canonicalize_dtype(array.dtype).name}{list(array.shape[1:])}"


def _where(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".") or "array"
