"""Federated data: client ids, examples per client, one client's arrays by id. Read lazily."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.errors import FedpaError
from fedpa.objectives.client_data import num_rows


class FederatedData(NamedTuple):
    ids: Sequence[str]
    num_examples: Callable[[str], int]
    examples: Callable[[str], Any]
    """id → a pytree of arrays with one leading axis in common."""


def from_mapping(clients: Mapping[Any, Any]) -> FederatedData:
    """Arrays in memory by client id. All of them are checked here, before any work starts.

    The order of the mapping does not matter: ids are taken as text and sorted.
    """
    if not clients:
        raise FedpaError("clients is empty: give at least one client id with its arrays")
    by_id = {str(name): name for name in clients}
    if len(by_id) != len(clients):
        raise FedpaError("clients has ids that are the same as text: ids must differ as text")
    ids = sorted(by_id)
    arrays = {name: jax.tree.map(np.asarray, clients[by_id[name]]) for name in ids}
    _check(arrays)
    counts = {name: num_rows(tree) for name, tree in arrays.items()}
    if not any(counts.values()):
        raise FedpaError("clients have no examples: at least one client needs one")
    return FederatedData(ids, counts.__getitem__, arrays.__getitem__)


def _check(arrays: Mapping[str, Any]) -> None:
    reference, expected = None, None
    for name, tree in arrays.items():
        try:
            num_rows(tree)
        except FedpaError as error:
            raise FedpaError(f"client {name!r}: {error}") from None
        shapes = jax.tree.map(lambda a: (a.shape[1:], a.dtype.name), tree)
        if expected is None:
            reference, expected = name, shapes
        elif shapes != expected:
            raise FedpaError(
                f"client {name!r} has arrays {shapes}: all clients need those of client "
                f"{reference!r}, {expected}"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            where = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
            if leaf.dtype == object:
                raise FedpaError(f"client {name!r}: {where} holds Python objects, not numbers")
            if np.issubdtype(leaf.dtype, np.inexact) and not np.isfinite(leaf).all():
                bad = np.argwhere(~np.isfinite(leaf))[0]
                value = leaf[tuple(bad)]
                raise FedpaError(
                    f"client {name!r}: {where}{bad.tolist()} = {value}: must be a finite number"
                )
