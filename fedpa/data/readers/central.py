"""A data set that has no clients yet: arrays of one length, from .npz or a table."""

from pathlib import Path

import numpy as np

from fedpa.data.readers.clients import Arrays
from fedpa.data.readers.grouped import column
from fedpa.data.readers.npz import read_npz
from fedpa.data.readers.table import ENDINGS, read_table, refuse_arrow_errors
from fedpa.errors import DataError, refuse


def read_central(path: Path, text_column: str = "") -> Arrays:
    """The arrays, or columns, by name. Text comes as object arrays of `str`.

    text_column: one that a CSV should not take for numbers ("007" stays).
    """
    endings = (".npz", *ENDINGS)
    if path.suffix not in endings:
        raise refuse("source", str(path), f"must end in one of {', '.join(endings)}")
    if not path.is_file():
        raise refuse("source", str(path), "is no file")
    arrays = _npz(path) if path.suffix == ".npz" else _table(path, text_column)
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise DataError(f"{path} has arrays {shown or 'of no name'}: must be of one length, not 0")
    return arrays


def _npz(path: Path) -> Arrays:
    return {
        name: column(f"{path}: {name}", array, range(array.size))
        if array.dtype.kind in "OUS"
        else array
        for name, array in read_npz(path).items()
    }


def _table(path: Path, text_column: str) -> Arrays:
    table = read_table(path, text_column)
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{path} has columns of the same name")
    arrays = {}
    for name in table.column_names:
        what = f"{path}: column {name!r}"
        with refuse_arrow_errors(f"{what} can't be read"):
            values = np.asarray(table.column(name).to_numpy())
        arrays[name] = column(what, values, range(len(table)))
    return arrays
