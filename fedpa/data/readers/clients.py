"""What every reader promises: clients that are known, arrays as long as was said."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.index import Index
from fedpa.errors import DataError, FedpaError, refuse

Arrays: TypeAlias = dict[str, np.ndarray]
Features: TypeAlias = Mapping[str, str] | Sequence[str] | None
"""Which features are read: their names, or the name each shall have → its name in the file. None:
all of them."""


def federation(
    source: object,
    index: Index,
    read: Callable[[str], Arrays],
    rows: Callable[[str], np.ndarray] | None = None,
) -> FederatedData:
    """Clients of `index`, each read by `read` when it is asked for.

    A client without examples may be read as no arrays at all: it gets empty ones like the others'.
    rows: id → the source's rows that are the client's, where that is a table.
    """
    if not index.ids:
        raise DataError(f"{source} has no clients")
    counts = dict(zip(index.ids, index.counts.tolist(), strict=True))
    like = next((name for name, n in counts.items() if n), None)

    def num_examples(name: str) -> int:
        if name not in counts:
            raise FedpaError(f"{source} has no client {name!r}")
        n: int = counts[name]
        return n

    def examples(name: str) -> Arrays:
        n = num_examples(name)
        arrays = read(name)
        if not n and not arrays and like is not None:
            return {feature: array[:0] for feature, array in read(like).items()}
        for feature, array in arrays.items():
            if array.ndim == 0 or len(array) != n:
                raise DataError(
                    f"{source}: client {name!r} has {feature} of shape {list(array.shape)}: must "
                    f"have {n} examples"
                )
        return arrays

    def locate(name: str, row: int | None) -> str:
        at = "" if rows is None or row is None else f", row {rows(name)[row]}"
        return f"{source}{at}: client {name!r}"

    return FederatedData(index.ids, num_examples, examples, locate=locate)


def wanted(features: Features, there: Collection[str], of: str) -> dict[str, str]:
    """The name each feature shall have → its name among those that are there."""
    if features is None:
        return {name: name for name in there}
    if isinstance(features, str):
        raise refuse("features", features, "must be a list of names")
    names = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
    for name in names.values():
        if name not in there:
            raise DataError(f"{of} has no feature {name!r}: there are {show_names(sorted(there))}")
    return names


def show_names(names: Sequence[object]) -> str:
    """Names of a file for a message: at most twenty, those that can't be printed in quotes."""
    shown = [str(name) if str(name).isprintable() else repr(name) for name in names[:20]]
    return ", ".join([*shown, "..."] if len(names) > 20 else shown)


def describe(error: BaseException) -> str:
    """An error's text on one line that can be printed. A KeyError shows its text in quotes."""
    own = error.args[0] if isinstance(error, KeyError) and error.args else error
    line = " ".join(str(own).split()) or type(error).__name__
    return "".join(char if char.isprintable() else "�" for char in line)[:300]


def text(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An object array of `str`, of bytes in UTF-8 or text. What is not UTF-8 shows as �."""
    array = np.empty(shape, object)
    array.ravel()[:] = [
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in values
    ]
    return array
