"""Tables with a column of client ids: pandas, Arrow, CSV, Parquet, Feather, Hugging Face.

`read_central` reads a table, or an .npz, that has no clients yet.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpa.data.cache import Index
from fedpa.data.federated import FederatedData
from fedpa.data.readers import table_trial
from fedpa.data.readers.npz import read_npz
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    check_size,
    choose_features,
    describe,
    find_limit,
    import_optional,
    make_federation,
    refuse_damaged,
    show_names,
)
from fedpa.errors import BadValueError, DataError, refuse

if TYPE_CHECKING:
    import datasets
    import pandas
    import pyarrow

ENDINGS = (".csv", ".parquet", ".feather")
HARMLESS = 2**28
"""Bytes that a table may always have: Parquet keeps a million equal values in a few."""


def open_table(
    table: "pandas.DataFrame | pyarrow.Table | str | Path",
    client_column: str,
    features: Features = None,
) -> FederatedData:
    """Group a table's rows by client, in the order in which they stand.

    Columns of lists of equal length become arrays with two axes, text object arrays of `str`.
    Client ids are taken as text; in a CSV they are not taken for numbers first ("007" stays).

    Args:
        table: A pandas.DataFrame, a pyarrow.Table, or the path of a file (.csv, .parquet,
            .feather). It is in memory as a whole, except for a Feather file that is not compressed,
            which is mapped. Parquet and Feather are first read in another process: a damaged file
            can crash Arrow.
        client_column: The column with the clients' ids.
        features: Which columns: names, or {the name it shall have: the column}; default: all
            others.
    Returns:
        The federation.
    Raises:
        DataError: The file is damaged, or a client id is missing.
    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"who": ["b", "a", "b"], "x": [1.0, 2.0, 3.0]})
        >>> open_table(table, "who").examples("b")
        {'x': array([1., 3.])}
    """
    source = "table"
    if isinstance(table, str | Path):
        source = str(table)
        table = read_table(Path(table), client_column)
    pandas = sys.modules.get("pandas")  # who has a DataFrame has imported it
    if pandas is not None and isinstance(table, pandas.DataFrame):
        names = _choose_columns(source, client_column, list(table.columns), features)
        codes, ids = pandas.factorize(table[client_column])
        _refuse_nulls(source, client_column, np.flatnonzero(codes < 0))
        by_client = _group_rows(source, codes, ids.tolist())
        return _make_federation(
            source, by_client, names, lambda column, rows: table[column].iloc[rows].to_numpy()
        )
    if "pyarrow" in sys.modules and isinstance(table, _pyarrow().Table):
        names = _choose_columns(source, client_column, table.column_names, features)
        by_client = _group_arrow_rows(source, table, client_column)
        return _make_federation(
            source, by_client, names, lambda column, rows: _take(source, table, column, rows)
        )
    raise refuse(
        "table",
        type(table).__name__,
        "must be a pandas.DataFrame, a pyarrow.Table or the path of a file",
    )


def _choose_columns(
    source: str, client_column: str, columns: Sequence[str], features: Features
) -> dict[str, str]:
    """The name each feature shall have → its column. Refuses a clients' column that is missing."""
    if client_column not in columns:
        shown = show_names(columns)
        raise refuse(
            "client_column", client_column, f"must be one of the columns {shown} of {source}"
        )
    _check_columns(source, columns)
    return choose_features(features, [name for name in columns if name != client_column], source)


def _check_columns(source: object, columns: Sequence[str]) -> None:
    if len(set(columns)) != len(columns):
        raise DataError(f"{source} has columns of the same name")


def _make_federation(
    source: str,
    by_client: Mapping[str, np.ndarray],
    names: Mapping[str, str],
    take: Callable[[str, np.ndarray], np.ndarray],
) -> FederatedData:
    """Rows by client, each column as an array.

    Args:
        by_client: id → its rows, ascending.
        names: The name each feature shall have → its column.
        take: (column, rows) → its values there.
    """
    ids = sorted(by_client)
    index = Index(ids, np.array([len(by_client[name]) for name in ids], np.int64))

    def read(client: str) -> Arrays:
        rows = by_client[client]
        where = f"{source}: client {client!r}, column"
        return {
            new: _as_array(f"{where} {old!r}", take(old, rows), rows) for new, old in names.items()
        }

    return make_federation(source, index, read, by_client.__getitem__)


def _group_arrow_rows(source: str, table: Any, client_column: str) -> dict[str, np.ndarray]:
    """Who has which rows of an Arrow table."""
    pyarrow = _pyarrow()
    with _refuse_arrow_errors(f"{source}: column {client_column!r} can't be read"):
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
        return _group_rows(source, ids.indices.to_numpy(), ids.dictionary.to_pylist())


def _group_rows(source: str, codes: np.ndarray, names: Sequence[Any]) -> dict[str, np.ndarray]:
    """Each client's rows, of the number of each row's client among `names`."""
    for name in names:
        if not isinstance(name, str | int | np.integer) or isinstance(name, bool) or name == "":
            raise DataError(f"{source} has client {name!r}: must be text or a whole number")
    ids = list(map(str, names))
    if len(set(ids)) != len(ids):
        raise DataError(f"{source} has clients that are the same as text")
    ends = np.cumsum(np.bincount(codes, minlength=len(ids)))
    rows = np.split(np.argsort(codes, kind="stable"), ends[:-1])
    # A name without rows is a category that no row has.
    return {name: own for name, own in zip(ids, rows, strict=False) if len(own)}


def _take(source: str, table: Any, name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of an Arrow table's column. A slice where they lie together: that reads no more."""
    first, n = int(rows[0]), len(rows)
    with _refuse_arrow_errors(f"{source}: column {name!r} can't be read"):
        values = table.column(name)
        together = rows[-1] - first == n - 1
        taken = values.slice(first, n) if together else values.take(rows)
        if taken.null_count:  # seen to be missing, where Arrow would make them NaN
            return np.array(taken.to_pylist(), object)
        return np.asarray(taken.to_numpy())


def _refuse_nulls(source: str, client_column: str, rows: np.ndarray) -> None:
    if len(rows):
        raise DataError(f"{source} has no client in row {rows[0]} (column {client_column!r})")


def _as_array(what: str, values: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
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
    with refuse_damaged(f"{what} has lists that are not equally long", ValueError):
        return _as_array(what, np.stack([np.asarray(value) for value in values]), rows)


def read_table(path: Path, client_column: str = "") -> Any:
    """A file as a pyarrow.Table; in a CSV, the clients' column is not taken for numbers."""
    if path.suffix not in ENDINGS:
        raise refuse("table", str(path), f"must end in one of {', '.join(ENDINGS)}")
    pyarrow = _pyarrow()
    if not path.is_file():
        raise DataError(f"{path} is not there")
    with _refuse_arrow_errors(f"{path} can't be read as {path.suffix[1:]}"):
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
    limit = find_limit(size, least=HARMLESS)
    done = subprocess.run(
        [sys.executable, "-P", table_trial.__file__, path, str(limit)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    what = f"{path} can't be read as {path.suffix[1:]}"
    if done.returncode:
        raise DataError(f"{what}: reading it ends the process ({done.returncode}), it is damaged")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise DataError(f"{what}: {describe(ValueError(answer['error']))}")
    check_size(str(path), answer["bytes"], size, limit)


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


def _refuse_arrow_errors(what: str) -> contextlib.AbstractContextManager[None]:
    """What Arrow raises, as one line of our own."""
    return refuse_damaged(what, _pyarrow().ArrowException, OSError, UnicodeDecodeError)


def _pyarrow() -> Any:
    return import_optional("pyarrow", "tables", "tables")


def open_huggingface(
    dataset: "datasets.Dataset", client_column: str, features: Features = None
) -> FederatedData:
    """Group the rows of a Hugging Face data set by client, in the order in which they stand.

    Columns are taken as `with_format("numpy")` gives them, images decoded, text as `str`.

    Args:
        dataset: A `datasets.Dataset`, which lies in files and is read row by row. Only the clients'
            ids are read at once.
        client_column: The column with the clients' ids.
        features: Which columns: names, or {the name it shall have: the column}; default: all
            others.
    Returns:
        The federation.
    Raises:
        FedpaError: It is no `datasets.Dataset`, or a client id is missing.
    Example:
        >>> import datasets
        >>> rows = datasets.Dataset.from_dict({"who": ["b", "a", "b"], "x": [1.0, 2.0, 3.0]})
        >>> open_huggingface(rows, "who").num_examples("b")
        2
    """
    datasets = import_optional("datasets", "Hugging Face data sets", "huggingface")
    if isinstance(dataset, datasets.DatasetDict):
        raise refuse("dataset", list(dataset), "must be one of these splits, dataset[split]")
    if not isinstance(dataset, datasets.Dataset):
        raise refuse("dataset", type(dataset).__name__, "must be a datasets.Dataset")
    names = _choose_columns("dataset", client_column, dataset.column_names, features)
    if not len(dataset):
        raise DataError("dataset has no rows")
    ids = dataset.select_columns([client_column]).with_format("arrow")[:]
    by_client = _group_arrow_rows("dataset", ids, client_column)
    columns = {
        column: dataset.select_columns([column]).with_format("numpy") for column in names.values()
    }
    return _make_federation(
        "dataset",
        by_client,
        names,
        lambda column, rows: np.asarray(columns[column][rows.tolist()][column]),
    )


def read_central(path: Path, text_column: str = "") -> Arrays:
    """The arrays, or columns, by name. Text comes as object arrays of `str`.

    text_column: one that a CSV should not take for numbers ("007" stays).
    """
    endings = (".npz", *ENDINGS)
    if path.suffix not in endings:
        raise refuse("source", str(path), f"must end in one of {', '.join(endings)}")
    if not path.is_file():
        raise refuse("source", str(path), "is no file")
    arrays = read_npz(path) if path.suffix == ".npz" else _read_columns(path, text_column)
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        shown = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise DataError(f"{path} has arrays {shown or 'of no name'}: must be of one length, not 0")
    return arrays


def _read_columns(path: Path, text_column: str) -> Arrays:
    table = read_table(path, text_column)
    _check_columns(path, table.column_names)
    arrays = {}
    for name in table.column_names:
        what = f"{path}: column {name!r}"
        with _refuse_arrow_errors(f"{what} can't be read"):
            values = np.asarray(table.column(name).to_numpy())
        arrays[name] = _as_array(what, values, range(len(table)))
    return arrays
