import io
import zipfile

import numpy as np
import pytest

from fedpa.data.readers import npz, open_npz
from fedpa.data.readers.npz import read_npz
from fedpa.data.readers.table import read_central
from fedpa.errors import DataError
from tests.refusals import refused


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
    monkeypatch.setattr(npz, "_open", None)
    assert open_npz(folder).num_examples("b.1") == 3


def test_a_new_file_is_seen(folder):
    open_npz(folder)
    np.savez(folder / "new.npz", x=np.ones((4, 2)), w=np.array(["é"] * 4))
    assert open_npz(folder).num_examples("new") == 4


def test_a_client_that_changed_is_refused(folder):
    data = open_npz(folder)
    np.savez(folder / "a.npz", x=np.ones((7, 2)), w=np.array(["é"]))
    with refused("client 'a'", "x", "[7, 2]", "1", kind=DataError):
        data.examples("a")


def test_bad_files_are_refused(folder):
    whole = (folder / "b.1.npz").read_bytes()
    for cut in (0, 50, len(whole) - 30):
        (folder / "b.1.npz").write_bytes(whole[:cut])
        with refused("b.1.npz", kind=DataError):
            open_npz(folder)
    np.savez(folder / "b.1.npz", x=np.ones(2), w=np.ones(3))
    with refused("b.1.npz", kind=DataError):
        open_npz(folder)
    np.savez(folder / "b.1.npz", x=np.float32(1), w=np.float32(1))
    with refused("b.1.npz", kind=DataError):
        open_npz(folder)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays_are_refused_when_read(folder, save):
    values = np.random.default_rng(0).random((50_000, 2))  # their end is not read with their header
    save(folder / "b.1.npz", w=np.array(["é"] * 50_000), x=values)
    content = bytearray((folder / "b.1.npz").read_bytes())
    content[-1000] ^= 0xFF
    (folder / "b.1.npz").write_bytes(content)
    data = open_npz(folder)
    with refused("b.1.npz", "array 'x'", kind=DataError):
        data.examples("b.1")


def test_pickled_arrays_are_refused(folder):
    np.savez(folder / "b.1.npz", x=np.array([{}, {}], object), w=np.ones(2))
    with refused("b.1.npz", "array 'x'", kind=DataError):
        open_npz(folder)


def test_clients_of_other_arrays_are_refused(folder):
    np.savez(folder / "b.1.npz", x=np.ones((3, 2)), w=np.ones(3), z=np.ones(3))
    with refused("client 'b.1'", "feature 'z'", kind=DataError):
        open_npz(folder)
    np.savez(folder / "b.1.npz", x=np.ones((3, 2)))
    with refused("client 'b.1'", "feature 'w'", kind=DataError):
        open_npz(folder)


def test_a_directory_of_no_arrays_is_no_client_without_examples(folder):
    np.savez(folder / "b.1.npz")
    with refused("b.1.npz", kind=DataError):
        open_npz(folder)
    with refused("b.1.npz", kind=DataError):
        read_npz(folder / "b.1.npz")


@pytest.mark.parametrize("read", [read_npz, lambda path: open_npz(path.parent)])
@pytest.mark.parametrize(
    ("found", "instead"),
    [
        (b"'shape': (3, 2)", b"'shape': (3, 9)"),  # more than there is
        (b"'shape': (3, 2)", b"'shape': (1, 2)"),  # less
        (b"'shape': (3, 2)", b"'shape': (-3,2)"),
        (b"'shape': (3, 2)", b"'shape': (3, 2("),
        (b"'shape': (3, 2)", b"'shape': 'abcd'"),
        (b"'descr': '<f4'", b"'descr': '<q4'"),
        (b"'descr': '<f4'", b"'descr': '|O8'"),
        (b"'descr': '<f4'", b"'descr': \xff<f4'"),
        (b"\x93NUMPY\x01\x00", b"\x93NUMPY\x09\x00"),
        (b"\x93NUMPY\x01\x00", b"\x93BUMPY\x01\x00"),
    ],
)
def test_a_damaged_header_names_the_file_and_the_array(tmp_path, cache, read, found, instead):
    path = tmp_path / "c.npz"
    np.savez(path, x=np.ones((3, 2), np.float32))
    with zipfile.ZipFile(path) as archive:
        content = archive.read("x.npy")
    assert found in content
    with zipfile.ZipFile(path, "w") as archive:  # of checksums that are right
        archive.writestr("x.npy", content.replace(found, instead))
    with refused("c.npz", "array 'x'", kind=DataError) as caught:
        read(path)
    assert str(caught.value).isprintable()


def test_other_files_under_that_name_are_refused(tmp_path, cache):
    path = tmp_path / "c.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    for read in (read_npz, read_central, lambda path: open_npz(path.parent)):
        with refused("c.npz", kind=DataError):
            read(path)


def rezipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def header(shape, dtype="<f8"):
    buffer = io.BytesIO()
    about = {"shape": shape, "fortran_order": False, "descr": dtype}
    np.lib.format.write_array_header_1_0(buffer, about)
    return buffer.getvalue()


@pytest.mark.parametrize("shape", [(10**15,), (2**40, 2**40), (10**12, 0), (0, 10**15)])
def test_claims_of_a_small_file_take_no_memory(tmp_path, cache, shape):
    path = tmp_path / "c.npz"
    rezipped(path, x=header(shape) + bytes(80))
    with refused("c.npz", "array 'x'", kind=DataError):
        read_npz(path)
    rezipped(path, x=header((10**12,), "<U0"))
    with refused("c.npz", "array 'x'", kind=DataError):
        read_npz(path)


def test_what_compresses_well_is_read_up_to_the_limit(tmp_path, cache, monkeypatch):
    path = tmp_path / "c.npz"
    np.savez_compressed(path, x=np.zeros(10**6))
    assert len(read_npz(path)["x"]) == 10**6
    monkeypatch.setenv("FEDPA_MAX_BYTES", str(10**6))
    with refused("c.npz", "FEDPA_MAX_BYTES", kind=DataError):
        read_npz(path)
    monkeypatch.setenv("FEDPA_MAX_BYTES", str(10**7))
    assert len(read_npz(path)["x"]) == 10**6
    monkeypatch.setenv("FEDPA_MAX_BYTES", "much")
    with refused("FEDPA_MAX_BYTES = 'much'"):
        read_npz(path)


def test_places_without_clients_are_refused(tmp_path, cache):
    with refused("absent", kind=DataError):
        open_npz(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with refused("empty", kind=DataError):
        open_npz(tmp_path / "empty")
    np.savez(tmp_path / "empty" / "a.npz", x=np.ones(2))
    with refused("feature 'y'", kind=DataError):
        open_npz(tmp_path / "empty", ["y"]).examples("a")
