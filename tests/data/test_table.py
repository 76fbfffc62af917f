import sys
from pathlib import Path

import numpy as np
import optax
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

import fedpa
from fedpa.data.readers import open_table, table, table_trial
from fedpa.data.readers.table import read_central
from fedpa.errors import DataError
from tests.refusals import refused

COLUMNS = {
    "user": ["007", "b", "007", "a", "b", "b"],
    "n": [1, 2, 3, 4, 5, 6],
    "score": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5],
    "text": ["u", "v", "w", "x", "y", "z"],
}
LISTS = {"vector": [[float(i), 0.0] for i in range(6)]}


def frame():
    return pd.DataFrame({**COLUMNS, **LISTS})


def arrow():
    """In two pieces, as tables often are."""
    whole = pa.table({**COLUMNS, **LISTS})
    return pa.concat_tables([whole.slice(0, 4), whole.slice(4)])


def as_parquet(path):
    parquet.write_table(arrow(), path / "t.parquet", row_group_size=4)
    return path / "t.parquet"


def as_feather(path):
    feather.write_feather(arrow(), str(path / "t.feather"), compression="uncompressed")
    return str(path / "t.feather")


def as_csv(path):
    frame().drop(columns="vector").to_csv(path / "t.csv", index=False)
    return path / "t.csv"


TABLES = {
    "pandas": lambda path: frame(),
    "pandas category": lambda path: frame().astype({"user": "category"}),
    "arrow": lambda path: arrow(),
    "arrow dictionary": lambda path: arrow().set_column(
        0, "user", arrow().column("user").dictionary_encode()
    ),
    "parquet": as_parquet,
    "feather": as_feather,
    "csv": as_csv,
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_rows_by_client(tmp_path, make):
    data = open_table(make(tmp_path), "user")
    assert list(data.ids) == ["007", "a", "b"]
    assert [data.num_examples(name) for name in data.ids] == [2, 1, 3]
    arrays = data.examples("b")
    assert arrays["n"].tolist() == [2, 5, 6]
    assert arrays["n"].dtype == np.int64
    assert arrays["score"].tolist() == [1.5, 4.5, 5.5]
    assert arrays["text"].tolist() == ["v", "y", "z"]
    assert arrays["text"].dtype == object
    if "vector" in arrays:
        assert arrays["vector"].tolist() == [[1.0, 0.0], [4.0, 0.0], [5.0, 0.0]]
        assert data.examples("a")["vector"].shape == (1, 2)
    assert "user" not in arrays


def test_features_are_chosen():
    assert list(open_table(frame(), "user", {"y": "n"}).examples("a")) == ["y"]
    with refused("table", "'label'", "n, score", kind=DataError):
        open_table(arrow(), "user", ["label"])


def test_clients_may_be_numbers():
    assert list(open_table(pd.DataFrame({"c": [10, 9], "x": [1, 2]}), "c").ids) == ["10", "9"]
    assert list(open_table(pa.table({"c": [10, 9], "x": [1, 2]}), "c").ids) == ["10", "9"]


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
@pytest.mark.parametrize(
    ("columns", "anchor"),
    [
        ({"x": [1]}, "client_column = 'c'"),
        ({"c": ["a", None, "b"], "x": [1, 2, 3]}, "row 1"),
        ({"c": [0.5, 1.5], "x": [1, 2]}, "client 0.5"),
        ({"c": ["a", ""], "x": [1, 2]}, "client ''"),
    ],
)
def test_bad_clients_are_refused(make, columns, anchor):
    with refused(anchor):
        open_table(make(columns), "c")


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
@pytest.mark.parametrize("values", [[[1], [2, 3]], ["a", None]])
def test_columns_that_are_no_arrays_are_refused(make, values):
    data = open_table(make({"c": ["a", "a"], "x": values}), "c")
    with refused("table", "client 'a'", "column 'x'", kind=DataError):
        data.examples("a")


def test_numbers_that_arrow_says_are_missing_are_refused():
    data = open_table(pa.table({"c": ["a", "a"], "x": [1, None]}), "c")
    with refused("column 'x'", "None", "row 1", kind=DataError):
        data.examples("a")


def test_tables_without_rows_are_refused():
    with refused("table", kind=DataError):
        open_table(arrow().slice(0, 0), "user")
    with refused("table", kind=DataError):
        open_table(frame().iloc[:0], "user")


def test_other_things_are_refused(tmp_path):
    with refused("table = 'list'"):
        open_table([1], "user")
    with refused("table = 't.xls'"):
        open_table("t.xls", "user")
    with refused("t.csv", kind=DataError):
        open_table(tmp_path / "t.csv", "user")
    for ending in ("csv", "parquet", "feather"):
        (tmp_path / f"t.{ending}").write_bytes(b"a,b\n1,2,3\n4\n")
        with refused(f"t.{ending}", ending, kind=DataError):
            open_table(tmp_path / f"t.{ending}", "user")


def test_a_cut_parquet_is_refused(tmp_path):
    path = as_parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with refused("t.parquet", kind=DataError):
        open_table(path, "user")


def damaged(path, column, row, offset):
    """Where a row's text of a column ends, in a Feather file that is not compressed."""
    lengths = [len(text) for text in COLUMNS[column]]
    there = np.cumsum([0, *lengths[:4]], dtype="<i4")  # of the first piece
    content = Path(path).read_bytes()
    assert content.count(there.tobytes()) == 1
    changed = there.copy()
    changed[row] = offset
    Path(path).write_bytes(content.replace(there.tobytes(), changed.tobytes()))


@pytest.mark.parametrize(("row", "offset"), [(1, -1), (1, 2**20), (4, 2**31 - 1)])
def test_damaged_text_ends_no_process(tmp_path, row, offset):
    """In offsets that Arrow follows without a look: today's process would be ended by a signal."""
    path = as_feather(tmp_path)
    damaged(path, "user", row, offset)
    for read in (lambda path: open_table(path, "user"), lambda path: read_central(Path(path))):
        with refused("t.feather", "feather", kind=DataError) as caught:
            read(path)
        assert str(caught.value).isprintable()


def test_a_file_that_crashes_arrow_is_refused(tmp_path, monkeypatch):
    crash = tmp_path / "crash.py"
    crash.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(table_trial, "__file__", str(crash))
    with refused("t.parquet", "(-11)", kind=DataError):
        open_table(as_parquet(tmp_path), "user")


LONG = "x" * 10**5


def as_one_batch(path, compression="zstd", **columns):
    batch = pa.record_batch(columns)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return path


@pytest.mark.parametrize(
    "values",
    [
        pa.array([LONG] * 100),
        pa.array([LONG] * 100).dictionary_encode(),
        pa.array([LONG] * 100, pa.string_view()),
        pa.nulls(10**9),
        pa.RunEndEncodedArray.from_arrays(pa.array([2**30]), pa.array([1.0])),
    ],
    ids=["text", "dictionary", "view", "nulls", "runs"],
)
def test_claims_of_a_small_file_take_no_memory(tmp_path, monkeypatch, values):
    path = as_one_batch(tmp_path / "t.feather", x=values)
    monkeypatch.setattr(table, "HARMLESS", 10**6)
    with refused("t.feather", kind=DataError):
        open_table(path, "x")


def test_claims_of_parquet_take_no_memory(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"c": np.zeros(10**5, int), "x": np.zeros(10**5)}), path)
    assert path.stat().st_size < 10**4
    assert open_table(path, "c").num_examples("0") == 10**5
    monkeypatch.setenv("FEDPA_MAX_BYTES", str(10**6))
    with refused("t.parquet", "FEDPA_MAX_BYTES", kind=DataError):
        open_table(path, "c")


def test_claims_of_a_buffer_take_no_memory(tmp_path):
    path = as_one_batch(tmp_path / "t.feather", x=np.zeros(12_345))
    content = path.read_bytes()
    said = (8 * 12_345).to_bytes(8, "little")  # before the compressed bytes
    assert said in content
    path.write_bytes(content.replace(said, (2**45).to_bytes(8, "little")))
    with refused("t.feather", kind=DataError):
        open_table(path, "x")


def test_names_of_columns_must_be_utf8(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("user,größe\na,1\n".encode("latin-1"))
    for read in (lambda path: open_table(path, "user"), read_central):
        with refused("t.csv", "column 1", "UTF-8", kind=DataError):
            read(path)


def test_text_must_be_utf8(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("user,word\na,größe\n".encode("latin-1"))
    with refused("t.csv", "client 'a'", "column 'word'", kind=DataError):
        open_table(path, "user").examples("a")
    with refused("t.csv", "column 'word'", kind=DataError):
        read_central(path)
    path.write_bytes("user,x\ngröße,1\n".encode("latin-1"))
    with refused("t.csv", kind=DataError):
        open_table(path, "user")


@pytest.mark.parametrize("clients", [[[1]], [{"a": 1}], [b"\xff"]])
def test_clients_of_other_types_are_refused(clients):
    with refused("table", kind=DataError):
        open_table(pa.table({"c": clients, "x": [1]}), "c")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = as_csv(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with refused("fedpa[tables]"):
        open_table(path, "user")


def fit(clients):
    local = fedpa.LocalTraining(optax.sgd(0.1), batch_size=5)
    method = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))
    loss = lambda p, b, k: (b["x"] * p - b["y"]) ** 2  # noqa: E731
    return fedpa.fit(loss, np.zeros(()), clients, method, rounds=2, clients_per_round=2)


def with_value(value, dtype="float64"):
    """Client a has rows 1, 3, 4, the value in row 3."""
    x = np.array([0, 1, 2, 3, 4], dtype)
    x = pd.Series(x, dtype=object if value is None else dtype)
    x[3] = value
    return pd.DataFrame({"user": list("babaa"), "x": x, "y": np.ones(5)})


@pytest.mark.parametrize(
    ("value", "dtype", "anchors"),
    [
        (np.nan, "float64", ["row 3", "client 'a'", "x[1] = nan"]),
        (2**40 + 7, "int64", ["row 3", "client 'a'", "x[1] = 1099511627783"]),
        (1e300, "float64", ["row 3", "client 'a'", "x[1] = 1e+300"]),
        ("three", "object", ["client 'a'", "column 'x'", "'three'", "row 3"]),
        (None, "float64", ["client 'a'", "column 'x'", "None", "row 3"]),
    ],
)
def test_a_table_with_a_bad_value_ends_a_run(value, dtype, anchors):
    with refused("table", *anchors, kind=DataError):
        fit(open_table(with_value(value, dtype), "user"))


def test_a_csv_with_missing_values_or_text_ends_a_run(tmp_path):
    path = tmp_path / "visits.csv"
    with_value(np.nan).to_csv(path, index=False)
    with refused("visits.csv", "client 'a'", "column 'x'", "None", "row 3", kind=DataError):
        fit(open_table(path, "user"))
    with_value(3.0).assign(y=list("uvwxy")).to_csv(path, index=False)
    with refused("visits.csv", "client 'a'", "y", "object", kind=DataError):
        fit(open_table(path, "user"))
