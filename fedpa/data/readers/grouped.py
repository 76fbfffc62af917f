"""Rows of a table by client, in the order in which they stand."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedpa.data.index import Index
from fedpa.data.readers.clients import show_names
from fedpa.errors import BadValueError, DataError, refuse


class Grouped(NamedTuple):
    who: Index
    rows: Callable[[str], np.ndarray]
    """id → its rows, ascending."""


def grouped(source: str, codes: np.ndarray, names: Sequence[Any]) -> Grouped:
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

    return Grouped(Index(ids, np.array([counts[by_name[n]] for n in ids], np.int64)), rows)


def check_column(source: str, client_column: str, columns: Sequence[str]) -> None:
    """Refuse a column that is not there."""
    if client_column not in columns:
        shown = show_names(columns)
        raise refuse(
            "client_column", client_column, f"must be one of the columns {shown} of {source}"
        )


def column(what: str, values: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
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
        return column(what, np.stack([np.asarray(value) for value in values]), rows)
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what} has lists that are not equally long") from None
