"""TensorFlow Federated's SQLite: rows of serialized tf.train.Example, and a table of clients."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from fedpa.data.cache import Index, load_index, progress, stamp
from fedpa.data.federated import FederatedData
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_text,
    choose_features,
    describe,
    make_federation,
    show_names,
)
from fedpa.errors import DataError

TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}
Value: TypeAlias = list[bytes] | np.ndarray
"""Bytes, float32 or int64."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST = 10
"""Bytes of a varint of 64 bits."""
STEP = 10_000
STEPS_PER_BYTE = 20
"""Steps of SQLite's machine, counted `STEP` at a time, that a statement may take for each byte of
the file: several times what a scan of the smallest rows takes."""


def open_sqlite(path: str | Path, split: str, features: Features = None) -> FederatedData:
    """The clients of one split.

    features: which are read: names, or {the name it shall have: its name in the file}; all unless
    told. A feature is an array with one axis if every example has one value of it, else with two;
    bytes come as `str` if all of a client's are UTF-8. Every thread has a connection of its own.
    Plain tables are read, no views or virtual tables.
    """
    path = Path(path)
    seen, size = stamp(path), path.stat().st_size
    with _reading(path) as connection:
        index = load_index(path, f"sqlite {split}", lambda: _build(path, connection, split))
        by_client = _rows_of_client(connection)
    connect = _connected(path, seen)
    position = {name: i for i, name in enumerate(index.ids)}

    def rows(name: str) -> Iterator[Any]:
        if by_client is not None:
            yield from connect().execute(by_client, (name, split))
            return
        first, number = (index.aligned[key][position[name]] for key in ("first", "number"))
        for begin, end in index.notes["runs"][first : first + number].tolist():
            yield from connect().execute(ROWS_OF_RUN, (begin, end, name, split))

    def read(name: str) -> Arrays:
        found, left = [], size
        with _refusing(path, f": client {name!r} can't be read"):
            for (row,) in rows(name):
                found.append(row)
                left -= len(row) if isinstance(row, bytes | str) else 0
                if left < 0:  # pages that are damaged lead to the same rows again and again
                    raise DataError(f"{path}: client {name!r} has more bytes than the file")
        expected = index.counts[position[name]]
        if len(found) != expected:
            raise DataError(
                f"{path}: client {name!r} has {len(found)} rows of split {split!r}: client_metadata"
                f" says {expected}"
            )
        return _arrays(f"{path}: client {name!r}", found, features)

    return make_federation(path, index, read)


def sqlite_splits(path: str | Path) -> list[str]:
    """The splits that have clients, sorted."""
    with _reading(Path(path)) as connection:
        return _splits(connection)


def _splits(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT DISTINCT split_name FROM client_metadata")
    return sorted(str(name) for (name,) in found)


ROWS_OF_RUN = (
    "SELECT serialized_example_proto FROM examples WHERE rowid BETWEEN ? AND ? "
    "AND +client_id = ? AND +split_name = ? ORDER BY rowid"
)


def _rows_of_client(connection: sqlite3.Connection) -> str | None:
    """The question for a client's rows, if an SQL index answers it."""
    for _, index, *_ in connection.execute("PRAGMA index_list(examples)").fetchall():
        columns = [row[2] for row in connection.execute(f'PRAGMA index_info("{index}")')]
        if columns[:1] == ["client_id"]:
            split = "+split_name"  # so that no index of splits is taken instead
        elif columns[:2] == ["split_name", "client_id"]:
            split = "split_name"
        else:
            continue
        return (
            "SELECT serialized_example_proto FROM examples "
            f"WHERE client_id = ? AND {split} = ? ORDER BY rowid"
        )
    return None


def _build(path: Path, connection: sqlite3.Connection, split: str) -> Index:
    splits = _splits(connection)
    if split not in splits:
        raise DataError(f"{path} has no split {split!r}: there are {show_names(splits) or 'none'}")
    found = connection.execute(
        "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?", (split,)
    ).fetchall()
    size = path.stat().st_size  # no row takes less than a byte
    for name, number in found:
        if not isinstance(name, str) or not isinstance(number, int) or not 0 <= number <= size:
            raise DataError(f"{path}: client_metadata has client {name!r} of {number!r} examples")
    index = Index([name for name, _ in found], np.array([n for _, n in found], np.int64))
    if _rows_of_client(connection) is not None:
        return index
    return _with_runs(path, connection, split, index)


def _with_runs(path: Path, connection: sqlite3.Connection, split: str, index: Index) -> Index:
    """Where each client's rows lie: otherwise every one would be looked for in the whole table."""
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in index.ids}
    with progress(f"indexing {path.name}") as tell:
        last = connection.execute("SELECT max(rowid) FROM examples").fetchone()[0]
        client, begin, end = None, 0, 0
        rows = connection.execute(
            "SELECT rowid, client_id FROM examples WHERE +split_name = ? ORDER BY rowid", (split,)
        )
        for done, (row, name) in enumerate(rows):
            if name != client:
                if name not in runs:
                    raise DataError(f"{path}: client {name!r} has rows but is no client of {split}")
                if client is not None:
                    runs[client].append((begin, end))
                client, begin = name, row
            end = row
            if done % 100_000 == 0:
                tell(row, last)
        if client is not None:
            runs[client].append((begin, end))
    number = np.array([len(runs[name]) for name in index.ids], np.int64)
    every = [run for name in index.ids for run in runs[name]]
    return index._replace(
        aligned={"first": np.cumsum(number) - number, "number": number},
        notes={"runs": np.array(every, np.int64).reshape(-1, 2)},
    )


def _arrays(client: str, rows: list[Any], features: Features) -> Arrays:
    """Features by name, one row an example. All rows must have the same."""
    decoded: list[dict[str, Value]] = []
    for i, row in enumerate(rows):
        if not isinstance(row, bytes):
            raise DataError(f"{client}, row {i} is a {type(row).__name__}: must be bytes")
        try:
            decoded.append(decode_example(row))
        except DataError as error:
            raise DataError(f"{client}, row {i} is no tf.train.Example: {error}") from None
        if not decoded[i]:
            raise DataError(f"{client}, row {i} has no features: the example is empty")
        if extra := sorted(decoded[i].keys() - decoded[0].keys()):
            raise DataError(f"{client}, row {i} has feature {extra[0]!r}, which row 0 has not")
    if not decoded:
        return {}
    names = choose_features(features, list(decoded[0]), f"{client}, row 0")
    return {new: _column(client, old, decoded) for new, old in names.items()}


def _column(client: str, feature: str, rows: list[dict[str, Value]]) -> np.ndarray:
    values = []
    for i, row in enumerate(rows):
        if feature not in row:
            raise DataError(f"{client}, row {i} has no feature {feature!r}")
        value = row[feature]
        if (_kind(value), len(value)) != (_kind(rows[0][feature]), len(rows[0][feature])):
            raise DataError(
                f"{client}, row {i} has {feature!r} of {len(value)} {_kind(value)}: row 0 has "
                f"{len(rows[0][feature])} {_kind(rows[0][feature])}"
            )
        values.append(value)
    width = len(values[0])
    shape = (len(rows),) if width == 1 else (len(rows), width)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values).reshape(shape)
    flat = [piece for value in values for piece in value]
    return as_text(flat, shape) if all(map(_is_utf8, flat)) else _bytes(flat, shape)


def _kind(value: Value) -> str:
    return value.dtype.name if isinstance(value, np.ndarray) else "bytes"


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes(values: list[bytes], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(shape, object)
    array.ravel()[:] = values
    return array


class _Connection(sqlite3.Connection):
    """A connection whose every statement ends, also where damaged pages lead in circles."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        left = self.most

        def is_over() -> bool:
            nonlocal left
            left -= STEP
            return left < 0

        self.set_progress_handler(is_over, STEP)
        return super().execute(*args)

    most = 0
    """The steps that a statement may take."""


def _connection(path: Path) -> _Connection:
    # Immutable: nothing is locked and nothing written, not even beside the file.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False, factory=_Connection)
    connection.most = STEPS_PER_BYTE * path.stat().st_size + 100 * STEP
    return connection


class _Own:
    """A thread's connection. It is closed when the thread ends, or nobody reads any more."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection, self.process = connection, os.getpid()

    def __del__(self) -> None:
        self.connection.close()


def _connected(path: Path, seen: str) -> Callable[[], sqlite3.Connection]:
    """One connection for every thread of every process, all to the file that was seen."""
    local = threading.local()

    def connect() -> sqlite3.Connection:
        own: _Own | None = getattr(local, "own", None)
        if own is None or own.process != os.getpid():
            if stamp(path) != seen:
                raise DataError(f"{path} has changed since it was opened")
            local.own = own = _Own(_connection(path))
        return own.connection

    return connect


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a file that has the tables."""
    if not path.is_file():
        raise DataError(f"{path} is not there")
    with _refusing(path, " can't be read, it is cut or no SQLite file"):
        connection = _connection(path)
        try:
            kinds = _kinds(connection)
            for table, columns in TABLES.items():
                kind = kinds.get(table, "table")
                if kind != "table":
                    raise DataError(f"{path}: {table} is a {kind}: must be a plain table")
                there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
                if not there:
                    raise DataError(f"{path} has no table {table}: it is not in the layout of TFF")
                if columns - there:
                    lacking = ", ".join(sorted(columns - there))
                    raise DataError(f"{path}: table {table} has no column {lacking}")
            yield connection
        finally:
            connection.close()


def _kinds(connection: sqlite3.Connection) -> dict[str, str]:
    """What each name of the file is: "table", "view", "virtual" (a table) and the like."""
    if sqlite3.sqlite_version_info < (3, 37):
        return dict(
            connection.execute(
                "SELECT lower(name), CASE WHEN type = 'table' AND NOT rootpage THEN 'virtual' "
                "ELSE type END FROM sqlite_master WHERE type IN ('table', 'view')"
            )
        )
    found = connection.execute("PRAGMA main.table_list").fetchall()
    return {name.lower(): kind for _, name, kind, *_ in found}


@contextlib.contextmanager
def _refusing(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}{what}: {describe(error)}") from None


def decode_example(message: bytes) -> dict[str, Value]:
    """The features of one example. Fields that are not known are passed over."""
    features: dict[str, Value] = {}
    for number, kind, value in _fields(message):
        if (number, kind) == (1, LENGTH):
            for inner, kind_inside, entry in _fields(value):
                if (inner, kind_inside) == (1, LENGTH):
                    name, feature = _entry(entry)
                    features[name] = feature
    return features


def _entry(entry: bytes) -> tuple[str, Value]:
    name, parts = b"", []
    for number, kind, value in _fields(entry):
        if (number, kind) == (1, LENGTH):
            name = value
        elif (number, kind) == (2, LENGTH):
            parts.append(value)  # messages that come in parts are merged, which is to append them
    try:
        return name.decode(), _feature(b"".join(parts))
    except UnicodeDecodeError:
        raise DataError(f"a feature's name is not UTF-8: {name!r}") from None


def _feature(feature: bytes) -> Value:
    """Of the three lists the last one that is there counts; one that comes in parts is merged."""
    chosen, parts = 1, list[bytes]()
    for number, kind, value in _fields(feature):
        if number in (1, 2, 3) and kind == LENGTH:
            if number != chosen:
                chosen, parts = number, []
            parts.append(value)
    merged = b"".join(parts)
    if chosen == 1:
        return [value for number, kind, value in _fields(merged) if (number, kind) == (1, LENGTH)]
    return _floats(merged) if chosen == 2 else _integers(merged)


def _floats(message: bytes) -> np.ndarray:
    pieces = []
    for number, kind, value in _fields(message):
        if number == 1 and kind in (LENGTH, FIXED32):
            if len(value) % 4:
                raise DataError(f"a packed list of floats has {len(value)} bytes")
            pieces.append(value)
    return np.frombuffer(b"".join(pieces), "<f4").astype(np.float32)


def _integers(message: bytes) -> np.ndarray:
    # One by one and packed are the same bytes without their tags.
    kinds = (LENGTH, VARINT)
    pieces = [v for number, kind, v in _fields(message) if number == 1 and kind in kinds]
    return _varints(b"".join(pieces))


def _varints(data: bytes) -> np.ndarray:
    """Packed int64 numbers, seven bits a byte, lowest first; negative ones take all 64."""
    if not data:
        return np.zeros(0, np.int64)
    if len(data) == 1 and data[0] < 0x80:  # a label: not worth the machinery below
        return np.array([data[0]], np.int64)
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if not len(ends) or ends[-1] != len(raw) - 1:
        raise DataError("a number is cut")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > LONGEST:
        raise DataError(f"a number has more than {LONGEST} bytes")
    place = np.arange(len(raw)) - np.repeat(starts, lengths)
    bits = (raw & 0x7F).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _fields(message: bytes) -> list[tuple[int, int, bytes]]:
    """(number, wire type, the value's bytes) of each field."""
    at, found = 0, []
    while at < len(message):
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == LENGTH:
            size, start = _varint(message, at)
            at = start + size
        elif kind == VARINT:
            _, at = _varint(message, at)
        elif kind == FIXED64:
            at += 8
        elif kind == FIXED32:
            at += 4
        else:
            raise DataError(f"wire type {kind} at byte {start} is none of tf.train.Example")
        if at > len(message):
            raise DataError(f"a field at byte {start} is cut")
        if not tag >> 3:
            raise DataError(f"a field at byte {start} has number 0")
        found.append((tag >> 3, kind, message[start:at]))
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    if at < len(message) and message[at] < 0x80:  # most are of one byte
        return message[at], at + 1
    number = 0
    for i, byte in enumerate(message[at : at + LONGEST]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, at + i + 1
    raise DataError(f"a number at byte {at} is cut")
