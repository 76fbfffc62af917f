"""Trees on the wire: arrays by name in an ArrayRecord, single numbers in a MetricRecord.

Nothing is said of the tree itself: both sides know it, and each checks what it is given. (A number
as an array of its own would bring 128 bytes of header along.)
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedpa.errors import FedpaError
from fedpa.training.named_arrays import path_name

ARRAYS, SCALARS, ABOUT, INFOS = "arrays", "scalars", "about", "infos"


def escape_text(text: object, longest: int = 500) -> str:
    r"""Make one printable line of what another machine sent, to be shown or logged.

    Line breaks, terminal codes and other invisible characters become escapes, as Python writes
    them; what is longer than `longest` characters is cut and ends in "…".

    >>> escape_text("lost\n\x1b[2Jround 9: done", 20)
    'lost\\n\\x1b[2Jround …'
    """
    start = str(text)[: longest + 1]
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in start)
    return line if len(line) <= longest else line[: longest - 1] + "…"


class WireError(FedpaError):
    """A message that is not what it should be; names the array. What it quotes is escaped."""

    def __init__(self, text: str) -> None:
        super().__init__(escape_text(text))


def packed(tree: Any) -> dict[str, Any]:
    """The tree's records, by their names in a message."""
    arrays, scalars = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        name, value = path_name(path), np.asarray(leaf)
        if value.ndim:
            arrays[name] = Array(np.ascontiguousarray(value))
        else:
            scalars[name] = value.item()
    return {ARRAYS: ArrayRecord(arrays), SCALARS: MetricRecord(scalars)}


def unpacked(template: Any, content: Mapping[str, Any]) -> Any:
    """The tree that a message holds. `template`: the arrays it must have, or their shapes."""
    arrays, scalars = dict(content.get(ARRAYS, {})), dict(content.get(SCALARS, {}))

    def fill(path: Any, leaf: Any) -> np.ndarray:
        name = path_name(path)
        source = arrays if leaf.ndim else scalars
        if name not in source:
            raise WireError(f"there is no array {name}")
        value = _numbers(name, source.pop(name))
        if value.shape != tuple(leaf.shape):
            raise WireError(f"{name} has shape {list(value.shape)}: {list(leaf.shape)} is needed")
        if leaf.ndim and value.dtype != leaf.dtype:
            raise WireError(f"{name} is of type {value.dtype}: {leaf.dtype} is needed")
        return value.astype(leaf.dtype)

    tree = jax.tree_util.tree_map_with_path(fill, template)
    if arrays or scalars:
        raise WireError(f"{next(iter(arrays | scalars))} is not among the arrays that are needed")
    return tree


def _numbers(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, Array):
        return np.asarray(value)
    try:
        return value.numpy()
    except Exception as error:
        raise WireError(f"{name} can't be read: {error}") from None


def shapes(tree: Any) -> dict[str, str]:
    """Each array's type and shape, as a text, by its name."""
    return {
        path_name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def num_bytes(content: RecordDict) -> int:
    """What a message's records weigh; of one that Flower can't weigh, nothing."""
    total = 0
    for record in content.values():
        with contextlib.suppress(IndexError, ValueError):  # a list or a text of nothing
            total += record.count_bytes()
    return total


def about(content: RecordDict) -> ConfigRecord:
    """What a message says beside its arrays."""
    record = content.get(ABOUT)
    if not isinstance(record, ConfigRecord):
        raise WireError(f"there is no record {ABOUT}")
    return record
