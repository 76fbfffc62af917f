"""TensorFlow Federated's SQLite: rows of serialized tf.train.Example, and a table of clients."""

import contextlib
import itertools
import operator
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np

from fedpa.data.cache import Index, load_index, progress
from fedpa.data.federated import FederatedData
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_objects,
    check_features,
    choose_features,
    hold_open,
    make_federation,
    refuse_damaged,
    show_names,
)
from fedpa.errors import DataError

TABLES = {
    "examples": {"split_name", "client_id", "serialized_example_proto"},
    "client_metadata": {"client_id", "split_name", "num_examples"},
}
BROKEN = (sqlite3.Error, UnicodeDecodeError)
"""What the module raises when a file is not as it should be."""
Value: TypeAlias = list[bytes] | np.ndarray
"""Bytes, float32 or int64."""

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
LONGEST = 10
"""Bytes of a varint of 64 bits."""
EVERYWHERE = (-(2**63), 2**63 - 1)
"""The first and the last row there may be."""
STEP = 10_000
STEPS_PER_BYTE = 20
"""Steps of SQLite's machine, counted `STEP` at a time, that a statement may take for each byte of
the file: several times what a scan of the smallest rows takes."""


def open_sqlite(path: str | Path, split: str, features: Features = None) -> FederatedData:
    """Open a split of a file of TensorFlow Federated's SQLite layout.

    A feature is an array with one axis if every example has one value of it, else with two; bytes
    come as `str` if all of a client's are UTF-8. The file stays open; any thread may read. Plain
    tables are read, no views or virtual tables.

    Args:
        path: The file, with tables `examples` and `client_metadata`.
        split: Its name in the file, see `sqlite_splits`.
        features: Which are read: names, or {the name it shall have: its name in the file}; default:
            all.
    Returns:
        The federation; a client is read when it is asked for.
    Raises:
        DataError: The file is damaged or of another layout, or has no such split.
    Example:
        >>> file = sqlite3.connect("clients.sqlite")
        >>> _ = file.executescript('''
        ...     CREATE TABLE examples (split_name, client_id, serialized_example_proto);
        ...     INSERT INTO examples VALUES ('train', 'a', x'0a0c0a0a0a017912051a030a0105');
        ...     CREATE TABLE client_metadata (client_id, split_name, num_examples);
        ...     INSERT INTO client_metadata VALUES ('a', 'train', 1)''')
        >>> file.close()
        >>> open_sqlite("clients.sqlite", "train").examples("a")
        {'y': array([5])}
    """
    path = Path(path)
    with _open_tables(path) as connection:
        get_connection = hold_open(path, _Connection)
        statement, is_indexed = _make_statement(connection)
        index = load_index(
            path, f"sqlite {split}", lambda: _build(path, connection, split, is_indexed)
        )
    position = {name: i for i, name in enumerate(index.ids)}
    runs, edges = index.notes["runs"], index.notes["edges"]

    def read(name: str) -> Arrays:
        where, place = f"{path}: client {name!r}", position[name]
        connection = get_connection()
        rows, left = [], connection.size
        with refuse_damaged(f"{where} can't be read", *BROKEN), connection.lock:
            for begin, end in runs[edges[place] : edges[place + 1]].tolist():
                for (row,) in connection.execute(statement, (begin, end, name, split)):
                    rows.append(row)
                    left -= len(row) if isinstance(row, bytes | str) else 0
                    if left < 0:  # pages that are damaged lead to the same rows again and again
                        raise DataError(f"{where} has more bytes than the file")
        if len(rows) != index.counts[place]:
            raise DataError(
                f"{where} has {len(rows)} rows of split {split!r}: client_metadata says "
                f"{index.counts[place]}"
            )
        return _make_arrays(where, rows, features)

    return make_federation(path, index, read)


def sqlite_splits(path: str | Path) -> list[str]:
    """List the splits that have clients.

    Args:
        path: A file of TensorFlow Federated's SQLite layout.
    Returns:
        Their names, sorted.
    Raises:
        DataError: The file is damaged or of another layout.
    Example:
        >>> file = sqlite3.connect("clients.sqlite")
        >>> _ = file.executescript('''
        ...     CREATE TABLE examples (split_name, client_id, serialized_example_proto);
        ...     CREATE TABLE client_metadata (client_id, split_name, num_examples);
        ...     INSERT INTO client_metadata VALUES ('a', 'train', 1), ('b', 'test', 1)''')
        >>> file.close()
        >>> sqlite_splits("clients.sqlite")
        ['test', 'train']
    """
    with _open_tables(Path(path)) as connection:
        return _find_splits(connection)


def _find_splits(connection: sqlite3.Connection) -> list[str]:
    names = connection.execute("SELECT DISTINCT split_name FROM client_metadata")
    return sorted(str(name) for (name,) in names)


def _make_statement(connection: sqlite3.Connection) -> tuple[str, bool]:
    """What to ask for a client's rows between two of them, and whether an SQL index answers it."""
    rowid, client, split, is_indexed = "rowid", "+client_id", "+split_name", False
    for _, index, *_ in connection.execute("PRAGMA index_list(examples)").fetchall():
        columns = [row[2] for row in connection.execute(f'PRAGMA index_info("{index}")')]
        by_client = columns[:1] == ["client_id"]
        if by_client or columns[:2] == ["split_name", "client_id"]:
            # With a + before what should not be looked up, so that no other index is taken.
            split = "+split_name" if by_client else "split_name"
            rowid, client, is_indexed = "+rowid", "client_id", True
            break
    statement = (
        f"SELECT serialized_example_proto FROM examples WHERE {rowid} BETWEEN ? AND ? "
        f"AND {client} = ? AND {split} = ? ORDER BY rowid"
    )
    return statement, is_indexed


def _build(path: Path, connection: sqlite3.Connection, split: str, is_indexed: bool) -> Index:
    """The clients of a split, and where their rows lie.

    Its notes are `runs`, the first and last row of each run of a client's rows, client by client,
    and `edges`: client i's runs are those from edges[i] to edges[i + 1].
    """
    splits = _find_splits(connection)
    if split not in splits:
        raise DataError(f"{path} has no split {split!r}: there are {show_names(splits) or 'none'}")
    clients = connection.execute(
        "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?", (split,)
    ).fetchall()
    size = path.stat().st_size  # no row takes less than a byte
    for name, number in clients:
        if not isinstance(name, str) or not isinstance(number, int) or not 0 <= number <= size:
            raise DataError(f"{path}: client_metadata has client {name!r} of {number!r} examples")
    clients.sort()
    ids = [name for name, _ in clients]
    runs = {name: [EVERYWHERE] for name in ids}
    if not is_indexed:
        runs = _find_runs(path, connection, split, ids)
    notes = {
        "runs": np.array([run for name in ids for run in runs[name]], np.int64).reshape(-1, 2),
        "edges": np.cumsum([0, *(len(runs[name]) for name in ids)], dtype=np.int64),
    }
    return Index(ids, np.array([number for _, number in clients], np.int64), notes)


def _find_runs(
    path: Path, connection: sqlite3.Connection, split: str, ids: list[str]
) -> dict[str, list[tuple[int, int]]]:
    """Where each client's rows lie: otherwise every one would be looked for in the whole table."""
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in ids}
    with progress(f"indexing {path.name}") as tell:
        last = connection.execute("SELECT max(rowid) FROM examples").fetchone()[0]
        rows = connection.execute(
            "SELECT client_id, rowid FROM examples WHERE +split_name = ? ORDER BY rowid", (split,)
        )
        for done, (name, own) in enumerate(itertools.groupby(rows, operator.itemgetter(0))):
            if name not in runs:
                raise DataError(f"{path}: client {name!r} has rows but is no client of {split}")
            _, begin = next(own)
            end = begin
            for _, end in own:  # noqa: B007
                pass
            runs[name].append((begin, end))
            if done % 1000 == 0:
                tell(end, last)
    return runs


def _make_arrays(client: str, rows: list[Any], features: Features) -> Arrays:
    """Features by name, one row an example. All rows must have the same of those that are read."""
    examples: list[dict[str, Value]] = []
    names: dict[str, str] = {}
    for i, row in enumerate(rows):
        where = f"{client}, row {i}"
        if not isinstance(row, bytes):
            raise DataError(f"{where} is a {type(row).__name__}: must be bytes")
        try:
            examples.append(decode_example(row))
        except DataError as error:
            raise DataError(f"{where} is no tf.train.Example: {error}") from None
        if not examples[i]:
            raise DataError(f"{where} has no features: the example is empty")
        if i == 0:
            names = choose_features(features, examples[0], where)
            unread = {name: None for name in examples[0] if name not in names.values()}
        check_features(where, unread | examples[i], "row 0", examples[0])
    return {
        new: _make_array(client, old, [example[old] for example in examples])
        for new, old in names.items()
    }


def _make_array(client: str, feature: str, values: list[Any]) -> np.ndarray:
    width = len(values[0])
    for i, value in enumerate(values):
        if (_kind(value), len(value)) != (_kind(values[0]), width):
            raise DataError(
                f"{client}, row {i} has {feature!r} of {len(value)} {_kind(value)}: row 0 has "
                f"{width} {_kind(values[0])}"
            )
    shape = (len(values),) if width == 1 else (len(values), width)
    if isinstance(values[0], np.ndarray):
        return np.concatenate(values).reshape(shape)
    pieces = list(itertools.chain.from_iterable(values))
    with contextlib.suppress(UnicodeDecodeError):
        pieces = [piece.decode() for piece in pieces]
    return as_objects(pieces, shape)


def _kind(value: Value) -> str:
    return value.dtype.name if isinstance(value, np.ndarray) else "bytes"


class _Connection(sqlite3.Connection):
    """A connection whose every statement ends, also where damaged pages lead in circles."""

    def __init__(self, path: Path) -> None:
        # Immutable: nothing is locked and nothing written, not even beside the file.
        uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        super().__init__(uri, uri=True, check_same_thread=False)
        self.size = path.stat().st_size
        self.lock = threading.Lock()
        """For threads that read."""

    def execute(self, *args: Any) -> sqlite3.Cursor:
        left = STEPS_PER_BYTE * self.size + 100 * STEP

        def is_over() -> bool:
            nonlocal left
            left -= STEP
            return left < 0

        self.set_progress_handler(is_over, STEP)
        return super().execute(*args)

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _open_tables(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a file that has the tables."""
    if not path.is_file():
        raise DataError(f"{path} is not there")
    with (
        refuse_damaged(f"{path} can't be read, it is truncated or not an SQLite file", *BROKEN),
        contextlib.closing(_Connection(path)) as connection,
    ):
        kinds = dict(
            connection.execute(
                "SELECT lower(name), CASE WHEN type = 'table' AND NOT rootpage THEN 'virtual' "
                "ELSE type END FROM sqlite_master WHERE type IN ('table', 'view')"
            )
        )
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


def decode_example(message: bytes) -> dict[str, Value]:
    """The features of one example. Fields that are not known are passed over."""
    features: dict[str, Value] = {}
    for inner in _select(_fields(message), 1):
        for entry in _select(_fields(inner), 1):
            fields = _fields(entry)
            name = b"".join(_select(fields, 1)[-1:])
            try:
                # Messages that come in parts are merged, which is to append them.
                features[name.decode()] = _decode_feature(b"".join(_select(fields, 2)))
            except UnicodeDecodeError:
                raise DataError(f"a feature's name is not UTF-8: {name!r}") from None
    return features


def _decode_feature(feature: bytes) -> Value:
    """Of the three lists the last one that is there counts; one that comes in parts is merged."""
    chosen, parts = 1, list[bytes]()
    for number, kind, value in _fields(feature):
        if number in (1, 2, 3) and kind == LENGTH:
            if number != chosen:
                chosen, parts = number, []
            parts.append(value)
    fields = _fields(b"".join(parts))
    if chosen == 1:
        return _select(fields, 1)
    if chosen == 3:  # one by one and packed are the same bytes without their tags
        return _varints(b"".join(_select(fields, 1, LENGTH, VARINT)))
    pieces = _select(fields, 1, LENGTH, FIXED32)
    for piece in pieces:
        if len(piece) % 4:
            raise DataError(f"a packed list of floats has {len(piece)} bytes")
    return np.frombuffer(b"".join(pieces), "<f4").astype(np.float32)


def _select(fields: list[tuple[int, int, bytes]], wanted: int, *kinds: int) -> list[bytes]:
    """The values of a field; of wire type LENGTH unless others are given."""
    kinds = kinds or (LENGTH,)
    return [value for number, kind, value in fields if number == wanted and kind in kinds]


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
    at, fields = 0, []
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
        fields.append((tag >> 3, kind, message[start:at]))
    return fields


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
