"""Tables with a column of client ids: pandas, Arrow, CSV, Parquet, Feather, Hugging Face.

`read_central` reads a table, or an .npz, that has no clients yet.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.readers import table_trial
from fedpa.data.readers.npz import read_npz
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    Groups,
    as_column,
    check_column,
    choose_features,
    describe,
    group_rows,
    import_optional,
    make_federation,
)
from fedpa.data.size_limit import check_size, find_limit
from fedpa.errors import DataError, refuse

ENDINGS = (".csv", ".parquet", ".feather")
HARMLESS = 2**28
"""Bytes that a table may always have: Parquet keeps a million equal values in a few."""


def open_table(table: Any, client_column: str, features: Features = None) -> FederatedData:
    """Rows by client, in the order in which they stand; the other columns are the features.

    table: a pandas.DataFrame, a pyarrow.Table, or the path of a file (.csv, .parquet, .feather). It
    is in memory as a whole, except for a Feather file that is not compressed, which is mapped.
    Parquet and Feather are first read in another process: a damaged file can crash Arrow.
    features: which columns: names, or {the name it shall have: the column}; all others unless told.
    Columns of lists of equal length become arrays with two axes, text object arrays of `str`.
    Client ids are taken as text; in a CSV they are not taken for numbers first ("007" stays).
    """
    source = "table"
    if isinstance(table, str | Path):
        source = str(table)
        table = read_table(Path(table), client_column)
    pandas = sys.modules.get("pandas")  # who has a DataFrame has imported it
    if pandas is not None and isinstance(table, pandas.DataFrame):
        by_client, take = _of_pandas(source, table, client_column)
        columns = list(table.columns)
    elif "pyarrow" in sys.modules and isinstance(table, _pyarrow().Table):
        by_client, take = _of_arrow(source, table, client_column)
        columns = table.column_names
    else:
        raise refuse(
            "table",
            type(table).__name__,
            "must be a pandas.DataFrame, a pyarrow.Table or the path of a file",
        )
    names = choose_features(features, [name for name in columns if name != client_column], source)

    def read(client: str) -> Arrays:
        rows = by_client.rows(client)
        where = f"{source}: client {client!r}, column"
        return {
            new: as_column(f"{where} {old!r}", take(old, rows), rows) for new, old in names.items()
        }

    return make_federation(source, by_client.who, read, by_client.rows)


def _of_pandas(
    source: str, frame: Any, client_column: str
) -> tuple[Groups, Callable[[str, np.ndarray], np.ndarray]]:
    import pandas

    check_column(source, client_column, list(frame.columns))
    if not frame.columns.is_unique:
        raise DataError(f"{source} has columns of the same name")
    codes, names = pandas.factorize(frame[client_column])
    _refuse_nulls(source, client_column, np.flatnonzero(codes < 0))
    by_client = group_rows(source, codes, names.tolist())
    return by_client, lambda name, rows: frame[name].iloc[rows].to_numpy()


def _of_arrow(
    source: str, table: Any, client_column: str
) -> tuple[Groups, Callable[[str, np.ndarray], np.ndarray]]:
    check_column(source, client_column, table.column_names)
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{source} has columns of the same name")

    def take(name: str, rows: np.ndarray) -> np.ndarray:
        with refuse_arrow_errors(f"{source}: column {name!r} can't be read"):
            return _take(table.column(name), rows)

    return arrow_clients(source, table, client_column), take


def arrow_clients(source: str, table: Any, client_column: str) -> Groups:
    """Who has which rows of an Arrow table."""
    pyarrow = _pyarrow()
    with refuse_arrow_errors(f"{source}: column {client_column!r} can't be read"):
        ids = table.column(client_column)
        nulls = np.flatnonzero(ids.is_null().to_numpy()) if ids.null_count else np.zeros(0, int)
        _refuse_nulls(source, client_column, nulls)
        if not len(ids):
            raise DataError(f"{source} has no rows")
        if not pyarrow.types.is_dictionary(ids.type):
            ids = ids.dictionary_encode()
        ids = ids.unify_dictionaries().combine_chunks()
        if isinstance(ids, pyarrow.ChunkedArray):
            ids = ids.chunk(0)
        return group_rows(source, ids.indices.to_numpy(), ids.dictionary.to_pylist())


def _take(values: Any, rows: np.ndarray) -> np.ndarray:
    """A slice where a client's rows lie together: that reads no more than them."""
    first, n = int(rows[0]), len(rows)
    together = rows[-1] - first == n - 1
    taken = values.slice(first, n) if together else values.take(rows)
    if taken.null_count:  # seen to be missing, where Arrow would make them NaN
        return np.array(taken.to_pylist(), object)
    return np.asarray(taken.to_numpy())


def _refuse_nulls(source: str, client_column: str, rows: np.ndarray) -> None:
    if len(rows):
        raise DataError(f"{source} has no client in row {rows[0]} (column {client_column!r})")


def read_table(path: Path, client_column: str = "") -> Any:
    """A file as a pyarrow.Table; in a CSV, the clients' column is not taken for numbers."""
    if path.suffix not in ENDINGS:
        raise refuse("table", str(path), f"must end in one of {', '.join(ENDINGS)}")
    pyarrow = _pyarrow()
    if not path.is_file():
        raise DataError(f"{path} is not there")
    with refuse_arrow_errors(f"{path} can't be read as {path.suffix[1:]}"):
        if path.suffix == ".csv":
            from pyarrow import csv

            types = csv.ConvertOptions(column_types={client_column: pyarrow.string()})
            table = csv.read_csv(path, convert_options=types)
        else:
            _try(path)
            table = table_trial.read_file(path)
        _check_names(path, table)
        return table


def _try(path: Path) -> None:
    """Refuse a Parquet or Feather file that Arrow can't read in another process."""
    size = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-P", table_trial.__file__, path, str(find_limit(size, least=HARMLESS))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    what = f"{path} can't be read as {path.suffix[1:]}"
    if done.returncode:
        raise DataError(f"{what}: reading it ends the process ({done.returncode}), it is damaged")
    found = json.loads(done.stdout)
    if "error" in found:
        raise DataError(f"{what}: {describe(ValueError(found['error']))}")
    check_size(str(path), found["bytes"], size, least=HARMLESS)


def _check_names(path: Path, table: Any) -> None:
    """Refuse names of columns that are no text."""
    for i in range(table.num_columns):
        try:
            table.field(i).name  # noqa: B018
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: the name of column {i} is not UTF-8: {error.object[:40]!r}. Save it as "
                "UTF-8"
            ) from None


@contextlib.contextmanager
def refuse_arrow_errors(what: str) -> Iterator[None]:
    """What Arrow raises, as one line of our own."""
    try:
        yield
    except (_pyarrow().ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{what}: {describe(error)}") from None


def _pyarrow() -> Any:
    return import_optional("pyarrow", "tables", "tables")


def open_huggingface(dataset: Any, client_column: str, features: Features = None) -> FederatedData:
    """Rows by client, in the order in which they stand; the other columns are the features.

    dataset: a `datasets.Dataset`, which lies in files and is read row by row. Only the clients'
    names are read at once.
    features: which columns: names, or {the name it shall have: the column}; all others unless told.
    Columns are taken as `with_format("numpy")` gives them, images decoded, text as `str`.
    """
    datasets = import_optional("datasets", "Hugging Face data sets", "huggingface")
    if isinstance(dataset, datasets.DatasetDict):
        raise refuse("dataset", list(dataset), "must be one of these splits, dataset[split]")
    if not isinstance(dataset, datasets.Dataset):
        raise refuse("dataset", type(dataset).__name__, "must be a datasets.Dataset")
    check_column("dataset", client_column, dataset.column_names)
    if not len(dataset):
        raise DataError("dataset has no rows")
    ids = dataset.select_columns([client_column]).with_format("arrow")[:]
    by_client = arrow_clients("dataset", ids, client_column)
    columns = [name for name in dataset.column_names if name != client_column]
    names = choose_features(features, columns, "dataset")
    rows = dataset.select_columns(list(dict.fromkeys(names.values()))).with_format("numpy")

    def read(client: str) -> Arrays:
        own = by_client.rows(client)
        taken = rows[own.tolist()]
        where = f"dataset: client {client!r}, column"
        return {
            new: as_column(f"{where} {old!r}", np.asarray(taken[old]), own)
            for new, old in names.items()
        }

    return make_federation("dataset", by_client.who, read, by_client.rows)


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
        name: as_column(f"{path}: {name}", array, range(array.size))
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
        arrays[name] = as_column(what, values, range(len(table)))
    return arrays
