import sys

import numpy as np
import pytest

from fedpa.data.readers import open_huggingface
from fedpa.errors import DataError
from tests.refusals import refused

datasets = pytest.importorskip("datasets")

COLUMNS = {
    "user": ["b", "a", "b", "b"],
    "label": [1, 2, 3, 4],
    "text": ["u", "v", "w", "x"],
    "vector": [[float(i), 1.0] for i in range(4)],
}


@pytest.fixture(scope="module")
def dataset():
    return datasets.Dataset.from_dict(COLUMNS)


def test_rows_by_client(dataset):
    data = open_huggingface(dataset, "user")
    assert list(data.ids) == ["a", "b"]
    assert data.num_examples("b") == 3
    arrays = data.examples("b")
    assert arrays["label"].tolist() == [1, 3, 4]
    assert arrays["text"].tolist() == ["u", "w", "x"]
    assert arrays["text"].dtype == object
    assert arrays["vector"].tolist() == [[0.0, 1.0], [2.0, 1.0], [3.0, 1.0]]
    assert data.examples("a")["vector"].shape == (1, 2)


def test_rows_that_were_selected_and_moved(dataset):
    data = open_huggingface(dataset.select([3, 1, 0]), "user", {"y": "label"})
    assert data.examples("b")["y"].tolist() == [4, 1]


def test_from_files_on_disk(dataset, tmp_path):
    dataset.save_to_disk(str(tmp_path / "set"))
    data = open_huggingface(datasets.load_from_disk(str(tmp_path / "set")), "user")
    assert data.examples("b")["label"].tolist() == [1, 3, 4]
    assert data.examples("b")["label"].dtype == np.int64


def test_bad_data_sets_are_refused(dataset):
    with refused("client_column = 'who'"):
        open_huggingface(dataset, "who")
    with refused("dataset = ['train']"):
        open_huggingface(datasets.DatasetDict(train=dataset), "user")
    with refused("dataset = 'dict'"):
        open_huggingface({}, "user")
    with refused("dataset", kind=DataError):
        open_huggingface(dataset.select([]), "user")
    with refused("row 1", kind=DataError):
        open_huggingface(datasets.Dataset.from_dict({"c": ["a", None], "x": [1, 2]}), "c")
    ragged = datasets.Dataset.from_dict({"c": ["a", "a"], "x": [[1], [2, 3]]})
    with refused("client 'a'", "column 'x'", kind=DataError):
        open_huggingface(ragged, "c").examples("a")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("fedpa[huggingface]"):
        open_huggingface({}, "user")
