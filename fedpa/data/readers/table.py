"""A table with a column that says whose row it is: pandas, Arrow, CSV, Parquet or Feather."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.readers.clients import Arrays, Features, federation, wanted
from fedpa.data.readers.grouped import Grouped, check_column, column, grouped
from fedpa.errors import DataError, FedpaError, refuse

ENDINGS = (".csv", ".parquet", ".feather")


def open_table(table: Any, client_column: str, features: Features = None) -> FederatedData:
    """Rows by client, in the order in which they stand; the other columns are the features.

    table: a pandas.DataFrame, a pyarrow.Table, or the path of a file (.csv, .parquet, .feather). It
    is in memory as a whole, except for a Feather file that is not compressed, which is mapped.
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
    names = wanted(features, [name for name in columns if name != client_column], source)

    def read(client: str) -> Arrays:
        rows = by_client.rows(client)
        where = f"{source}: client {client!r}, column"
        return {
            new: column(f"{where} {old!r}", take(old, rows), rows) for new, old in names.items()
        }

    return federation(source, by_client.who, read, by_client.rows)


def _of_pandas(
    source: str, frame: Any, client_column: str
) -> tuple[Grouped, Callable[[str, np.ndarray], np.ndarray]]:
    import pandas

    check_column(client_column, list(frame.columns))
    if not frame.columns.is_unique:
        raise DataError(f"{source} has columns of the same name")
    codes, names = pandas.factorize(frame[client_column])
    _refuse_nulls(source, client_column, np.flatnonzero(codes < 0))
    by_client = grouped(source, codes, names.tolist())
    return by_client, lambda name, rows: frame[name].iloc[rows].to_numpy()


def _of_arrow(
    source: str, table: Any, client_column: str
) -> tuple[Grouped, Callable[[str, np.ndarray], np.ndarray]]:
    check_column(client_column, table.column_names)
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{source} has columns of the same name")
    return arrow_clients(source, table, client_column), lambda name, rows: _taken(
        table.column(name), rows
    )


def arrow_clients(source: str, table: Any, client_column: str) -> Grouped:
    """Who has which rows of an Arrow table."""
    pyarrow = _pyarrow()
    ids = table.column(client_column)
    nulls = np.flatnonzero(ids.is_null().to_numpy()) if ids.null_count else np.zeros(0, np.int64)
    _refuse_nulls(source, client_column, nulls)
    if not len(ids):
        raise DataError(f"{source} has no rows")
    if not pyarrow.types.is_dictionary(ids.type):
        ids = ids.dictionary_encode()
    ids = ids.unify_dictionaries().combine_chunks()
    if isinstance(ids, pyarrow.ChunkedArray):
        ids = ids.chunk(0)
    return grouped(source, ids.indices.to_numpy(), ids.dictionary.to_pylist())


def _taken(values: Any, rows: np.ndarray) -> np.ndarray:
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
    try:
        if path.suffix == ".csv":
            from pyarrow import csv

            types = csv.ConvertOptions(column_types={client_column: pyarrow.string()})
            return csv.read_csv(path, convert_options=types)
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path, memory_map=True)
        from pyarrow import feather

        return feather.read_table(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise DataError(f"{path} can't be read as {path.suffix[1:]}: {message}") from None


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise FedpaError(
            "tables need pandas and pyarrow: install them with pip install 'fedpa[tables]'"
        ) from None
    return pyarrow
