import sys

import numpy as np
import optax
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

import fedpa
from fedpa.data.readers import open_table
from fedpa.errors import DataError, FedpaError

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
    table = pa.table({**COLUMNS, **LISTS})
    return pa.concat_tables([table.slice(0, 4), table.slice(4)])


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
    with pytest.raises(DataError, match="table has no feature 'label': there are n, score"):
        open_table(arrow(), "user", ["label"])


def test_clients_may_be_numbers():
    assert list(open_table(pd.DataFrame({"c": [10, 9], "x": [1, 2]}), "c").ids) == ["10", "9"]
    assert list(open_table(pa.table({"c": [10, 9], "x": [1, 2]}), "c").ids) == ["10", "9"]


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": [1]}, "client_column = 'c': must be one of the columns x"),
        ({"c": ["a", None, "b"], "x": [1, 2, 3]}, "no client in row 1"),
        ({"c": [0.5, 1.5], "x": [1, 2]}, "client 0.5: must be text or a whole number"),
        ({"c": ["a", ""], "x": [1, 2]}, "client ''"),
    ],
)
def test_bad_clients_are_refused(make, columns, words):
    with pytest.raises(FedpaError, match=words):
        open_table(make(columns), "c")


@pytest.mark.parametrize("make", [pd.DataFrame, pa.table], ids=["pandas", "arrow"])
@pytest.mark.parametrize("values", [[[1], [2, 3]], ["a", None]])
def test_columns_that_are_no_arrays_are_refused(make, values):
    data = open_table(make({"c": ["a", "a"], "x": values}), "c")
    with pytest.raises(DataError, match="table: client 'a', column 'x' has"):
        data.examples("a")


def test_numbers_that_arrow_says_are_missing_are_refused():
    data = open_table(pa.table({"c": ["a", "a"], "x": [1, None]}), "c")
    with pytest.raises(DataError, match="column 'x' has None in row 1"):
        data.examples("a")


def test_tables_without_rows_are_refused():
    with pytest.raises(DataError, match="no rows"):
        open_table(arrow().slice(0, 0), "user")
    with pytest.raises(DataError, match="no clients"):
        open_table(frame().iloc[:0], "user")


def test_other_things_are_refused(tmp_path):
    with pytest.raises(FedpaError, match=r"table = 'list': must be a pandas\.DataFrame"):
        open_table([1], "user")
    with pytest.raises(FedpaError, match=r"must end in one of \.csv, \.parquet, \.feather"):
        open_table("t.xls", "user")
    with pytest.raises(DataError, match="is not there"):
        open_table(tmp_path / "t.csv", "user")
    for ending in ("csv", "parquet", "feather"):
        (tmp_path / f"t.{ending}").write_bytes(b"a,b\n1,2,3\n4\n")
        with pytest.raises(DataError, match=rf"t\.{ending} can't be read as {ending}"):
            open_table(tmp_path / f"t.{ending}", "user")


def test_a_cut_parquet_is_refused(tmp_path):
    path = as_parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"t\.parquet can't be read"):
        open_table(path, "user")


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = as_csv(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FedpaError, match=r"pip install 'fedpa\[tables\]'"):
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
    ("value", "dtype", "says"),
    [
        (np.nan, "float64", r"row 3: client 'a': x\[1\] = nan"),
        (2**40 + 7, "int64", r"row 3: client 'a': x\[1\] = 1099511627783"),
        (1e300, "float64", r"row 3: client 'a': x\[1\] = 1e\+300"),
        ("three", "object", r"client 'a', column 'x' has 'three' in row 3"),
        (None, "float64", r"client 'a', column 'x' has None in row 3"),
    ],
)
def test_a_table_with_a_bad_value_ends_a_run(value, dtype, says):
    with pytest.raises(DataError, match=f"table.*{says}"):
        fit(open_table(with_value(value, dtype), "user"))


def test_a_csv_with_missing_values_or_text_ends_a_run(tmp_path):
    path = tmp_path / "visits.csv"
    with_value(np.nan).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"visits\.csv: client 'a', column 'x' has None in row 3"):
        fit(open_table(path, "user"))
    with_value(3.0).assign(y=list("uvwxy")).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"visits\.csv: client 'a': y is of type object"):
        fit(open_table(path, "user"))
