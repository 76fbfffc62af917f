import numpy as np
import pytest

from fedpa.data.readers import npz, open_npz
from fedpa.errors import DataError


@pytest.fixture
def folder(tmp_path, cache):
    path = tmp_path / "clients"
    path.mkdir()
    for name, n in (("b.1", 3), ("a", 1), ("none", 0)):
        np.savez(
            path / f"{name}.npz", x=np.full((n, 2), n, np.float32), w=np.array(["é"] * n, "U1")
        )
    (path / "notes.txt").write_text("not a client")
    return path


def test_files_are_clients(folder):
    data = open_npz(folder)
    assert list(data.ids) == ["a", "b.1", "none"]
    assert [data.num_examples(name) for name in data.ids] == [1, 3, 0]
    arrays = data.examples("b.1")
    assert arrays["x"].tolist() == [[3.0, 3.0]] * 3
    assert arrays["w"].dtype == object
    assert arrays["w"].tolist() == ["é"] * 3
    assert data.examples("none")["x"].shape == (0, 2)
    assert list(open_npz(folder, {"inputs": "x"}).examples("a")) == ["inputs"]


def test_headers_are_read_once(folder, monkeypatch):
    open_npz(folder)
    monkeypatch.setattr(npz, "_count", None)
    assert open_npz(folder).num_examples("b.1") == 3


def test_a_new_file_is_seen(folder):
    open_npz(folder)
    np.savez(folder / "new.npz", x=np.ones((4, 2)))
    assert open_npz(folder).num_examples("new") == 4


def test_a_client_that_changed_is_refused(folder):
    data = open_npz(folder)
    np.savez(folder / "a.npz", x=np.ones((7, 2)))
    with pytest.raises(DataError, match=r"client 'a' has x of shape \[7, 2\]: must have 1"):
        data.examples("a")


def test_bad_files_are_refused(folder):
    whole = (folder / "b.1.npz").read_bytes()
    for cut in (0, 50, len(whole) - 30):
        (folder / "b.1.npz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"b\.1\.npz can't be read"):
            open_npz(folder)
    np.savez(folder / "b.1.npz", x=np.ones(2), y=np.ones(3))
    with pytest.raises(DataError, match=r"b\.1\.npz has arrays of shapes .*one first axis"):
        open_npz(folder)
    np.savez(folder / "b.1.npz", x=np.float32(1))
    with pytest.raises(DataError, match=r"b\.1\.npz has arrays of shapes"):
        open_npz(folder)


def test_damaged_and_pickled_arrays_are_refused_when_read(folder):
    np.savez(folder / "obj.npz", x=np.array([{}, {}], object))
    np.savez(folder / "b.1.npz", x=np.ones(100_000))  # its end is not read with its header
    content = bytearray((folder / "b.1.npz").read_bytes())
    content[-1000] ^= 0xFF
    (folder / "b.1.npz").write_bytes(content)
    data = open_npz(folder)
    for name in ("obj", "b.1"):
        with pytest.raises(DataError, match=rf"{name}\.npz can't be read"):
            data.examples(name)


def test_places_without_clients_are_refused(tmp_path, cache):
    with pytest.raises(DataError, match="absent is not a directory"):
        open_npz(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.npz files"):
        open_npz(tmp_path / "empty")
    np.savez(tmp_path / "empty" / "a.npz", x=np.ones(2))
    with pytest.raises(DataError, match="has no feature 'y'"):
        open_npz(tmp_path / "empty", ["y"]).examples("a")
