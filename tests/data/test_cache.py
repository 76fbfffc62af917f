import numpy as np
import pytest

from fedpa.data.cache import Index, load_index
from fedpa.errors import DataError
from tests.refusals import refused


@pytest.fixture
def file(tmp_path, cache):
    path = tmp_path / "data.bin"
    path.write_bytes(b"content")
    return path


class Builds:
    """Counts how often it is asked."""

    def __init__(self, *ids):
        self.ids, self.times = list(ids), 0

    def __call__(self):
        self.times += 1
        return Index(self.ids, np.arange(len(self.ids)), {"runs": np.ones((2, 2))})


def test_it_is_kept(file):
    build = Builds("a", "b", "é\n")
    first, second = load_index(file, "", build), load_index(file, "", build)
    assert build.times == 1
    for index in (first, second):
        assert index.ids == ["a", "b", "é\n"]
        assert index.counts.tolist() == [0, 1, 2]
        assert index.notes["runs"].shape == (2, 2)


def test_parts_and_changes_have_their_own(file):
    build = Builds("a")
    load_index(file, "train", build)
    load_index(file, "test", build)
    assert build.times == 2
    file.write_bytes(b"longer content")
    load_index(file, "train", build)
    assert build.times == 3


def test_a_client_that_is_there_twice_is_refused(file):
    with refused("data.bin", "client 'a'", kind=DataError):
        load_index(file, "", Builds("a", "a", "b"))


@pytest.mark.parametrize("damage", [b"", b"PK", None])
def test_a_damaged_index_is_made_anew(file, cache, damage):
    build = Builds("a", "b")
    load_index(file, "", build)
    (kept,) = (cache / "indices").iterdir()
    kept.write_bytes(kept.read_bytes()[:-30] if damage is None else damage)
    assert load_index(file, "", build).ids == ["a", "b"]
    assert build.times == 2
    load_index(file, "", build)
    assert build.times == 2


def test_an_index_of_another_compression_is_made_anew(file, cache):
    build = Builds("a", "b")
    load_index(file, "", build)
    (kept,) = (cache / "indices").iterdir()
    data = bytearray(kept.read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = 99
    kept.write_bytes(data)
    assert load_index(file, "", build).ids == ["a", "b"]
    assert build.times == 2


@pytest.mark.parametrize("at", range(30, 300, 30))
def test_flipped_bytes_are_seen(file, cache, at):
    load_index(file, "", Builds("a", "b"))
    (kept,) = (cache / "indices").iterdir()
    data = bytearray(kept.read_bytes())
    data[at] ^= 0xFF
    kept.write_bytes(data)
    assert load_index(file, "", Builds("a", "b")).ids == ["a", "b"]


def test_an_unwritable_cache_only_costs_time(file, cache):
    cache.parent.write_bytes(b"a file where the directory would be")
    build = Builds("a")
    for _ in range(2):
        assert load_index(file, "", build).ids == ["a"]
    assert build.times == 2


def test_a_file_that_is_not_there(tmp_path, cache):
    with refused("absent", kind=DataError):
        load_index(tmp_path / "absent", "", Builds("a"))
