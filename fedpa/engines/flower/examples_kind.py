"""The shapes of an example's arrays, as a text: what nodes tell the server of their data.

The server traces clients' programs with them, to know what must come back.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.errors import FedpaError

LARGEST = 2**31 - 1
"""Examples that a client may have."""


def as_text(shapes: Any) -> str:
    return json.dumps(_plain(shapes), sort_keys=True)


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {"dict": {str(name): _plain(part) for name, part in tree.items()}}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [_plain(part) for part in tree]}
    return {"array": [str(tree.dtype), list(tree.shape)]}


def from_text(text: str) -> Any:
    """The tree of shapes."""
    try:
        return _shaped(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FedpaError(f"an example's arrays are not told as they should be: {error}") from None


def _shaped(plain: Any) -> Any:
    ((kind, content),) = plain.items()
    if kind == "dict":
        return {name: _shaped(part) for name, part in content.items()}
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](_shaped(part) for part in content)
    dtype, shape = content
    return jax.ShapeDtypeStruct(tuple(int(n) for n in shape), np.dtype(dtype))


def remote(sizes: Mapping[str, int], kind: Any) -> FederatedData:
    """A federation of which ids, sizes and shapes are known. Its examples here are zeros."""

    def examples(name: str) -> Any:
        rows = sizes[name]
        return jax.tree.map(
            lambda x: np.broadcast_to(np.zeros((), x.dtype), (rows, *x.shape)), kind
        )

    return FederatedData(sorted(sizes), sizes.__getitem__, examples)
