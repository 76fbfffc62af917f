import json

import numpy as np
import pytest

from fedpa.data.readers import open_leaf
from fedpa.errors import DataError
from tests.data.tiny import small_disk
from tests.refusals import refused


def content(users):
    return {
        "users": list(users),
        "num_samples": [len(data["y"]) for data in users.values()],
        "user_data": users,
    }


ONE = {
    "b": {"x": [[0.5, 1.0], [0.25, 2.0]], "y": [3, 4]},
    "a/1%2F": {"x": [[1.5, 0.0]], "y": [5]},
    ".": {"x": [[1.5, 0.0]], "y": [5]},
}
TEXT = {"c": {"x": ["to be", "or not"], "y": ["e", "t"]}}


@pytest.fixture
def path(tmp_path, cache):
    return tmp_path / "all_data.json"


def write(path, value):
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("number", [1e39, -1e308])
def test_a_number_that_is_no_float32_is_refused(path, number):
    write(path, content({"a": {"x": [number, 1.5], "y": [0, 1]}}))
    with refused(str(path), "user 'a'", kind=DataError):
        open_leaf(path)


@pytest.mark.parametrize("number", ["2\0", 2.0, None, True])
def test_a_number_of_samples_that_is_none_is_refused(path, number):
    write(path, {"users": ["a"], "num_samples": [number], "user_data": {"a": {"y": [0]}}})
    with refused(str(path), "user 'a'", "num_samples"):
        open_leaf(path)


def test_users_are_clients(path):
    write(path, content(ONE))
    for _ in range(2):
        data = open_leaf(path)
        assert list(data.ids) == [".", "a/1%2F", "b"]
        assert [data.num_examples(name) for name in data.ids] == [1, 1, 2]
        arrays = data.examples("b")
        assert arrays["x"].dtype == np.float32
        assert arrays["x"].tolist() == ONE["b"]["x"]
        assert arrays["y"].tolist() == [3, 4]
        assert data.examples("a/1%2F")["y"].tolist() == [5]


def test_a_full_disk_is_told(path, cache):
    write(path, content({f"u{i}": {"x": [[0.5] * 100], "y": [1]} for i in range(50)}))
    with small_disk(), refused("File too large"):
        open_leaf(path)
    assert not list(cache.rglob("*.h5"))


def test_it_is_parsed_once(path, monkeypatch):
    open_leaf(write(path, content(ONE)))
    monkeypatch.setattr("fedpa.data.readers.leaf._parse", None)
    assert open_leaf(path).examples("b")["y"].tolist() == [3, 4]


def test_text_and_folders(tmp_path, cache):
    folder = tmp_path / "train"
    folder.mkdir()
    write(folder / "0.json", content(TEXT))
    write(folder / "1.json", content({"d": TEXT["c"], "e": {"x": [], "y": []}}))
    data = open_leaf(folder)
    assert list(data.ids) == ["c", "d", "e"]
    assert data.examples("d")["x"].tolist() == ["to be", "or not"]
    assert data.num_examples("e") == 0
    assert data.examples("e")["x"].shape == (0,)
    assert data.examples("e")["x"].dtype == object
    write(folder / "2.json", content(TEXT))
    with refused("train", "client 'c'", kind=DataError):
        open_leaf(folder)


def test_an_empty_user_is_shaped_like_the_others(tmp_path, cache):
    write(tmp_path / "0.json", content({"e": {"x": [], "y": []}}))
    write(tmp_path / "1.json", content(ONE))
    arrays = open_leaf(tmp_path).examples("e")
    assert arrays["x"].shape == (0, 2)
    assert arrays["x"].dtype == np.float32
    assert arrays["y"].dtype == np.int64


@pytest.mark.parametrize(
    ("change", "anchors"),
    [
        ({"users": ["b"], "num_samples": [2]}, ["user '.'"]),
        ({"users": [*ONE, "z"], "num_samples": [2, 1, 1, 1]}, ["user 'z'"]),
        ({"num_samples": [3, 1, 1]}, ["user 'b'", "2", "'x'", "num_samples", "3"]),
        ({"num_samples": [2, 1]}, ["3 users", "2 num_samples"]),
        ({"users": ["b", "b", "."]}, ["client 'b'"]),
        ({"users": [1, 2, 3]}, ["user 1"]),
        ({"users": None}, ["'users'"]),
        ({"users": [], "num_samples": [], "user_data": {}}, ["users"]),
        ({"user_data": {**ONE, "b": []}}, ["user 'b'"]),
        ({"user_data": {**ONE, "b": {"x": [[1], [2, 3]], "y": [1, 2]}}}, ["user 'b', 'x'"]),
        ({"user_data": {**ONE, "b": {"x": [1, "a"], "y": [1, 2]}}}, ["user 'b', 'x'"]),
        ({"user_data": {**ONE, "b": {"x": [1, None], "y": [1, 2]}}}, ["user 'b', 'x'"]),
        ({"user_data": {**ONE, "b": {"x": ["a", ["b"]], "y": [1, 2]}}}, ["user 'b', 'x'"]),
        ({"user_data": {**ONE, "b": {"x": [["a"], "b"], "y": [1, 2]}}}, ["user 'b', 'x'"]),
        (
            {"user_data": {**ONE, "b": {"x": ["a\0b", "c"], "y": [1, 2]}}},
            [r"'a\x00b'", "client 'b'"],
        ),
        ({"user_data": {**ONE, "b": {"a/b": [1, 2], "y": [1, 2]}}}, ["feature = 'a/b'"]),
        ({"user_data": {**ONE, "b": {"x": [2**70, 1], "y": [1, 2]}}}, ["user 'b', 'x'"]),
    ],
)
def test_bad_content_is_refused(path, cache, change, anchors):
    with refused("all_data.json", *anchors, kind=DataError):
        open_leaf(write(path, {**content(ONE), **change}))
    assert not [p for p in cache.rglob("*") if p.is_file()]


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps(content(ONE))[:-20], "\xff"])
def test_malformed_json_is_refused(path, text):
    path.write_bytes(text.encode("latin-1"))
    with refused("all_data.json", kind=DataError):
        open_leaf(path)


def test_one_long_text_takes_its_own_room_only(path, cache):
    """As an array of NumPy's text these would take 80 GB."""
    texts = ["short"] * 20_000 + ["x" * 1_000_000]
    write(path, content({"c": {"x": texts, "y": texts}}))
    assert open_leaf(path).examples("c")["x"].tolist() == texts


def test_places_without_json_are_refused(tmp_path, cache):
    with refused("absent", kind=DataError):
        open_leaf(tmp_path / "absent")
    with refused(tmp_path.name, kind=DataError):
        open_leaf(tmp_path)


def test_an_unwritable_cache_is_told(path, cache):
    write(path, content(ONE))
    cache.parent.write_bytes(b"a file where the directory would be")
    with refused("XDG_CACHE_HOME"):
        open_leaf(path)
