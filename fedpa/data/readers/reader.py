"""What every reader shares: clients that are known, arrays as long as was said, rows by client."""

import importlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fedpa.data.cache import Index
from fedpa.data.federated import FederatedData
from fedpa.errors import BadValueError, DataError, FedpaError, refuse

Arrays: TypeAlias = dict[str, np.ndarray]
Features: TypeAlias = Mapping[str, str] | Sequence[str] | None
"""Which features are read: their names, or the name each shall have → its name in the file. None:
all of them."""


def import_optional(name: str, what: str, extra: str) -> Any:
    """Import a package that only one of the readers needs; without it, say what installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise FedpaError(f"{what} need {name}: pip install 'fedpa[{extra}]' installs it") from None


def make_federation(
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


def choose_features(features: Features, there: Collection[str], of: str) -> dict[str, str]:
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


def as_text(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """An object array of `str`, of bytes in UTF-8 or text. What is not UTF-8 shows as �."""
    array = np.empty(shape, object)
    array.ravel()[:] = [
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in values
    ]
    return array


class Groups(NamedTuple):
    who: Index
    rows: Callable[[str], np.ndarray]
    """id → its rows, ascending."""


def group_rows(source: str, codes: np.ndarray, names: Sequence[Any]) -> Groups:
    """Clients by the number of each row's client among `names`."""
    for name in names:
        if not isinstance(name, str | int | np.integer) or isinstance(name, bool) or name == "":
            raise DataError(f"{source} has client {name!r}: must be text or a whole number")
    by_name = {str(name): code for code, name in enumerate(names)}
    if len(by_name) != len(names):
        raise DataError(f"{source} has clients that are the same as text")
    counts = np.bincount(codes, minlength=len(names))
    order = np.argsort(codes, kind="stable")
    ends = np.cumsum(counts)
    # A name without rows is a category that nobody is of.
    ids = sorted(name for name, code in by_name.items() if counts[code])

    def rows(name: str) -> np.ndarray:
        code = by_name[name]
        return order[ends[code] - counts[code] : ends[code]]

    return Groups(Index(ids, np.array([counts[by_name[n]] for n in ids], np.int64)), rows)


def check_column(source: str, client_column: str, columns: Sequence[str]) -> None:
    """Refuse a column that is not there."""
    if client_column not in columns:
        shown = show_names(columns)
        raise refuse(
            "client_column", client_column, f"must be one of the columns {shown} of {source}"
        )


def as_column(what: str, values: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Numbers as they are, lists of equal length as rows, text as objects.

    rows: the number of each value's row in the table.
    """
    if values.dtype.kind in "biufc":
        return values
    if values.dtype.kind in "US":
        return values.astype(object)
    if values.dtype.kind != "O":
        raise DataError(f"{what} is of type {values.dtype}: must be numbers, text or lists of them")
    kinds = Counter(map(type, values.flat))
    if all(issubclass(kind, str) for kind in kinds):
        return values
    if set(kinds) == {bytes}:
        raise DataError(f"{what} has bytes that are no text: must be UTF-8")
    if not all(issubclass(kind, list | tuple | np.ndarray) for kind in kinds):
        usual = kinds.most_common(1)[0][0]
        odd = next((i for i, value in enumerate(values.flat) if type(value) is not usual), 0)
        raise BadValueError(
            f"{what} has {values.flat[odd]!r} in row {rows[odd * len(values) // values.size]}: "
            "must be numbers, text or lists of them, none missing and all of one kind"
        )
    try:
        return as_column(what, np.stack([np.asarray(value) for value in values]), rows)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} has lists that are not equally long") from None
