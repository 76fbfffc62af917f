import contextlib
import os
import sqlite3
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedpa.data.readers import open_sqlite, sqlite_splits
from fedpa.errors import DataError
from tests.data.examples import encoded
from tests.refusals import refused

INDICES = {
    "no index": "",
    "by client": "CREATE INDEX i ON examples (client_id);",
    "by split and client": "CREATE INDEX i ON examples (split_name, client_id);",
    "by split": "CREATE INDEX i ON examples (split_name);",
    "both": "CREATE INDEX i ON examples (split_name); CREATE INDEX j ON examples (client_id);",
}


def row(label, text="wörds", width=4):
    return encoded(
        {
            "label": np.array([label], np.int64),
            "pixels": np.full(width, label / 2, np.float32),
            "tokens": [text],
            "raw": [b"\xff\xfe"],
        }
    )


# Clients' rows do not lie together, and those of splits are mixed.
ROWS = [
    ("train", "b", row(0)),
    ("train", "a", row(1)),
    ("test", "b", row(2)),
    ("train", "b", row(3)),
    ("train", "b", row(4)),
    ("train", "a", row(5)),
    ("train", "one", row(6)),
]
COUNTS = [("b", "train", 3), ("a", "train", 2), ("one", "train", 1), ("none", "train", 0)]
COUNTS += [("b", "test", 1)]


def written(path, rows=ROWS, counts=COUNTS, index=""):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            "CREATE TABLE examples (split_name, client_id, serialized_example_proto);"
            "CREATE TABLE client_metadata (client_id, split_name, num_examples);" + index
        )
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", counts)
    return path


@pytest.fixture
def path(tmp_path, cache):
    return tmp_path / "set #1?.sqlite"


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_clients_have_their_rows(path, index):
    written(path, index=index)
    for _ in range(2):
        data = open_sqlite(path, "train")
        assert list(data.ids) == ["a", "b", "none", "one"]
        assert [data.num_examples(name) for name in data.ids] == [2, 3, 0, 1]
        labels = {name: data.examples(name)["label"].tolist() for name in data.ids}
        assert labels == {"a": [1, 5], "b": [0, 3, 4], "none": [], "one": [6]}
    assert open_sqlite(path, "test").examples("b")["label"].tolist() == [2]


def test_features_become_arrays(path):
    data = open_sqlite(written(path), "train")
    arrays = data.examples("b")
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        "label": ((3,), np.int64),
        "pixels": ((3, 4), np.float32),
        "tokens": ((3,), object),
        "raw": ((3,), object),
    }
    assert arrays["tokens"].tolist() == ["wörds"] * 3
    assert arrays["raw"].tolist() == [b"\xff\xfe"] * 3
    assert data.examples("none")["pixels"].shape == (0, 4)
    chosen = open_sqlite(path, "train", {"y": "label"}).examples("a")
    assert list(chosen) == ["y"]


def test_splits(path):
    assert sqlite_splits(written(path)) == ["test", "train"]
    with refused("'held_out'", "test, train", kind=DataError):
        open_sqlite(path, "held_out")


def test_nothing_is_written_beside_it(path):
    before = written(path).read_bytes()
    path.chmod(0o444)
    open_sqlite(path, "train").examples("a")
    assert {p.name for p in path.parent.iterdir()} == {path.name, "cache"}
    assert path.read_bytes() == before


def test_several_threads_read(path):
    data = open_sqlite(written(path), "train")
    with ThreadPoolExecutor(4) as pool:
        for arrays in pool.map(data.examples, ["b"] * 40):
            assert arrays["label"].tolist() == [0, 3, 4]


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_file_that_was_replaced_is_not_mixed_with_the_old_one(path, index):
    data = open_sqlite(written(path, index=index), "train")
    data.examples("a")
    other = written(path.with_name("other"), [*ROWS, ("test", "b", row(9))], index=index)
    other.replace(path)
    assert data.examples("b")["label"].tolist() == [0, 3, 4]  # the old one is open
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(data.examples, "b").result()["label"].tolist() == [0, 3, 4]


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_file_that_was_replaced_before_it_was_read_is_refused(path, index, monkeypatch):
    data = open_sqlite(written(path, index=index), "train")
    data.examples("a")
    unread = open_sqlite(path, "train")
    other = written(path.with_name("other"), [*ROWS, ("test", "b", row(9))], index=index)
    other.replace(path)
    with refused("set #1?.sqlite", kind=DataError):
        unread.examples("b")
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as after a fork
    with refused("set #1?.sqlite", kind=DataError):
        data.examples("b")


@pytest.mark.parametrize(
    ("bad", "anchors"),
    [
        (row(1)[:-3], ["tf.train.Example"]),
        (b"\x00garbage", ["tf.train.Example"]),
        ("text", ["str", "bytes"]),
        (None, ["NoneType", "bytes"]),
        (b"", []),
        (encoded({}), []),
        (encoded({"label": np.ones(1, np.int64)}), ["'pixels'"]),
        (row(1) + encoded({"more": ["x"]}), ["'more'", "row 0"]),
        (row(1, width=3), ["'pixels'", "3 float32", "4 float32"]),
    ],
)
def test_a_bad_row_is_named(path, bad, anchors):
    written(path, [*ROWS[:5], ("train", "a", bad), ROWS[6]])
    data = open_sqlite(path, "train")
    assert data.examples("b")["label"].tolist() == [0, 3, 4]
    with refused("set #1?.sqlite", "client 'a', row 1", *anchors, kind=DataError):
        data.examples("a")


def test_a_feature_that_is_not_read_may_be_missing(path):
    written(path, [*ROWS[:5], ("train", "a", encoded({"label": np.ones(1, np.int64)})), ROWS[6]])
    data = open_sqlite(path, "train", ["label"])
    assert data.examples("a")["label"].tolist() == [1, 1]


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_counts_that_do_not_agree_are_refused(path, index):
    written(path, ROWS[:-2], index=index)
    with refused("client 'a'", "1 rows", "client_metadata", "2", kind=DataError):
        open_sqlite(path, "train").examples("a")


def test_tables_that_do_not_agree_are_refused(path):
    written(path, counts=COUNTS[:2])
    with refused("client 'one'", "train", kind=DataError):
        open_sqlite(path, "train")


@pytest.mark.parametrize(
    ("count", "anchor"),
    [
        (("a", "train", 2), "client 'a'"),
        ((None, "train", 2), "client None"),
        (("z", "train", "many"), "'many' examples"),
        (("z", "train", -1), "-1 examples"),
        (("z", "train", 10**15), "1000000000000000 examples"),
    ],
)
def test_bad_counts_are_refused(path, count, anchor):
    written(path, counts=[*COUNTS, count], index=INDICES["by client"])
    with refused("set #1?.sqlite", anchor, kind=DataError):
        open_sqlite(path, "train")


def test_files_of_another_kind_are_refused(path):
    with refused("set #1?.sqlite", kind=DataError):
        open_sqlite(path, "train")
    path.write_bytes(b"no database" * 1000)
    with refused("set #1?.sqlite", kind=DataError):
        sqlite_splits(path)
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE examples (split_name, client_id)")
    with refused("table examples", "serialized_example_proto", kind=DataError):
        open_sqlite(path, "train")
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE other (a)")
    with refused("table examples", kind=DataError):
        open_sqlite(path, "train")


def test_a_client_whose_examples_are_all_empty_is_refused(path):
    written(path, [("train", "a", b"")] * 2, [("a", "train", 2)])
    with refused("set #1?.sqlite", "client 'a', row 0", kind=DataError):
        open_sqlite(path, "train").examples("a")


VIEWS = {
    "view that never ends": "CREATE VIEW client_metadata AS WITH RECURSIVE n(i) AS (SELECT 1 UNION "
    "ALL SELECT i FROM n) SELECT i AS client_id, 'train' AS split_name, 1 AS num_examples FROM n",
    "view that ends": "CREATE VIEW Client_Metadata AS SELECT * FROM moved",
    "virtual table": "CREATE VIRTUAL TABLE client_metadata USING rtree(client_id, split_name, "
    "num_examples)",
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_only_plain_tables_are_read(path, view):
    written(path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(f"ALTER TABLE client_metadata RENAME TO moved; {view}")
    for read in (sqlite_splits, lambda path: open_sqlite(path, "train")):
        with refused("set #1?.sqlite", "client_metadata", kind=DataError):
            read(path)


def test_a_column_that_is_computed_is_none(path):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executescript(
            "CREATE TABLE examples (split_name, client_id, serialized_example_proto AS "
            "(zeroblob(900000000)));"
            "CREATE TABLE client_metadata (client_id, split_name, num_examples);"
        )
    with refused("table examples", "serialized_example_proto", kind=DataError):
        open_sqlite(path, "train")


def in_circles(path, table):
    """Pages that lead, level by level, to the next one forty times, and to the rows at last."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        asked = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = connection.execute(asked, (table,)).fetchone()
    content = bytearray(path.read_bytes())
    pages, width, depth = len(content) // size, 40, 15

    def inner(child):
        page = bytearray(size)
        first = size - 5 * width
        page[:12] = struct.pack(">BHHHBI", 5, 0, width, first, 0, child)
        for i in range(width):
            page[12 + 2 * i : 14 + 2 * i] = struct.pack(">H", first + 5 * i)
            page[first + 5 * i : first + 5 * i + 5] = struct.pack(">IB", child, i + 1)
        return page

    leaf = content[(root - 1) * size : root * size]
    content[(root - 1) * size : root * size] = inner(pages + 1)
    for level in range(1, depth):
        content += inner(pages + level + 1)
    content += leaf
    content[28:32] = struct.pack(">I", len(content) // size)
    path.write_bytes(content)


@pytest.mark.parametrize("table", ["client_metadata", "examples"])
@pytest.mark.parametrize("index", [INDICES["no index"], INDICES["by split"]])
def test_pages_that_lead_in_circles_are_refused(path, table, index):
    written(path, index=index)
    in_circles(path, table)
    with refused("set #1?.sqlite", kind=DataError):
        open_sqlite(path, "train").examples("a")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.95])
def test_a_cut_file_is_refused(path, share):
    rows = [("train", f"c{i}", row(i)) for i in range(300)]
    written(path, rows, [(f"c{i}", "train", 1) for i in range(300)])
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])

    def read_all():
        cut = open_sqlite(path, "train")
        for name in cut.ids:
            cut.examples(name)

    with refused("set #1?.sqlite", kind=DataError):
        read_all()
