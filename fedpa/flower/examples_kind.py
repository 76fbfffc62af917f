"""What nodes tell of their data, and what the server makes of it: ids, sizes and shapes."""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedpa.data.federated import FederatedData


def as_text(shapes: Any) -> str:
    """The shapes of an example's arrays, to be compared."""
    return json.dumps(_plain(shapes), sort_keys=True)


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {"dict": {str(name): _plain(part) for name, part in tree.items()}}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [_plain(part) for part in tree]}
    return {"array": [str(tree.dtype), list(tree.shape)]}


def remote(sizes: Mapping[str, int], kind: Any) -> FederatedData:
    """A federation of which ids, sizes and shapes are known; examples are zeros here."""

    def examples(name: str) -> Any:
        return jax.tree.map(lambda x: np.zeros((min(sizes[name], 1), *x.shape), x.dtype), kind)

    return FederatedData(sorted(sizes), sizes.__getitem__, examples)
