import contextlib
import errno
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest

from fedpa.data.archives import find
from fedpa.data.cache import show_progress
from fedpa.data.readers import hdf5, open_hdf5, write_hdf5
from fedpa.errors import DataError
from tests.refusals import refused


def client(n, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "pixels": rng.random((n, 4, 4), np.float32),
        "label": rng.integers(0, 10, n).astype(np.int32),
        "tokens": np.array([f"wörd {i}" for i in range(n)], object),
    }


CLIENTS = {"b": client(3, 1), "a": client(1, 2), "c:é": client(5, 3)}


@pytest.fixture
def path(tmp_path, cache):
    path = tmp_path / "set_train.h5"
    write_hdf5(path, CLIENTS.items())
    return path


def same(one, other):
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


def test_what_was_written_is_read(path):
    for _ in range(2):  # with an index made, and with one kept
        data = open_hdf5(path)
        assert list(data.ids) == ["a", "b", "c:é"]
        assert [data.num_examples(name) for name in data.ids] == [1, 3, 5]
        for name, arrays in CLIENTS.items():
            same(data.examples(name), arrays)
    assert all(isinstance(word, str) for word in data.examples("b")["tokens"])


def test_features_are_chosen_and_renamed(path):
    assert set(open_hdf5(path, ["label"]).examples("a")) == {"label"}
    same(
        open_hdf5(path, {"x": "pixels", "y": "label"}).examples("b"),
        {"x": CLIENTS["b"]["pixels"], "y": CLIENTS["b"]["label"]},
    )
    with refused("set_train.h5", "'image'", "label, pixels, tokens", kind=DataError):
        open_hdf5(path, ["image"])


def test_a_later_open_reads_nothing_of_the_file(path, monkeypatch):
    open_hdf5(path)
    monkeypatch.setattr(h5py, "File", None)
    assert open_hdf5(path).num_examples("c:é") == 5


def test_indexing_tells_how_far_it_is(path):
    told = []

    @contextlib.contextmanager
    def listener(what):
        told.append(what)
        yield lambda done, total: told.append((done, total))

    with show_progress(listener):
        open_hdf5(path)
        open_hdf5(path)
    assert told == ["indexing set_train.h5", (0, 3), (3, 3)]


def test_empty_clients_are_kept(tmp_path, cache):
    write_hdf5(tmp_path / "a.h5", [("0", {}), ("1", client(2)), ("2", client(0)), ("3", {})])
    data = open_hdf5(tmp_path / "a.h5")
    assert [data.num_examples(name) for name in data.ids] == [0, 2, 0, 0]
    for name in "023":
        arrays = data.examples(name)
        assert {k: (v.shape, v.dtype) for k, v in arrays.items()} == {
            "pixels": ((0, 4, 4), np.float32),
            "label": ((0,), np.int32),
            "tokens": ((0,), object),
        }


def test_strings_of_fixed_length_and_other_encodings(tmp_path, cache):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/a")
        group["fixed"] = np.array([b"one", b"two"])
        group["odd"] = np.array([b"\xff", b"ok"], object)
    arrays = open_hdf5(path).examples("a")
    assert arrays["fixed"].tolist() == ["one", "two"]
    assert arrays["odd"].tolist() == ["�", "ok"]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.2, 0.5, 0.8, 0.99, 0.9999])
def test_a_cut_file_is_refused(path, share):
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with refused("set_train.h5", kind=DataError):
        open_hdf5(path)


def test_a_file_that_is_cut_after_it_was_opened(path):
    data = open_hdf5(path)
    path.write_bytes(path.read_bytes()[:1000])
    with refused("set_train.h5", kind=DataError):
        data.examples("a")


def test_files_of_another_kind_are_refused(tmp_path, cache):
    path = tmp_path / "a.h5"
    with refused("a.h5", kind=DataError):
        open_hdf5(path)
    path.write_bytes(b"something else" * 100)
    with refused("a.h5", kind=DataError):
        open_hdf5(path)
    with h5py.File(path, "w") as file:
        file["other"] = np.ones(3)
    with refused("a.h5", "/examples", kind=DataError):
        open_hdf5(path)
    with h5py.File(path, "w") as file:
        file["examples"] = np.ones(3)
    with refused("a.h5", "/examples", kind=DataError):
        open_hdf5(path)
    with h5py.File(path, "w") as file:
        file.create_group("examples")
    with refused("a.h5", kind=DataError):
        open_hdf5(path)
    with h5py.File(path, "w") as file:
        file["examples/a"] = np.ones(3)
    with refused("a.h5", "client 'a'", kind=DataError):
        open_hdf5(path)


def test_clients_that_differ_are_refused(tmp_path, cache):
    path = tmp_path / "a.h5"
    write_hdf5(path, [("a", {"x": np.ones(2), "y": np.ones(3)})])
    data = open_hdf5(path)
    with refused("a.h5", "client 'a'", "y", "[3]", "2", kind=DataError):
        data.examples("a")
    with refused("a.h5", "client 'z'"):
        data.examples("z")
    write_hdf5(path, [("a", {"x": np.float32(2)})])
    with refused("a.h5", "client 'a'", "'x'", kind=DataError):
        open_hdf5(path)


@pytest.mark.parametrize(
    ("others", "feature"),
    [
        ("x", "feature 'y'"),
        ("yz", "feature 'x'"),
        ("xyz", "feature 'z'"),
    ],
)
def test_clients_of_other_features_are_refused(tmp_path, cache, others, feature):
    path = tmp_path / "a.h5"
    features = {"0": "", "a": "xy", "b": others}
    write_hdf5(path, [(c, dict.fromkeys(own, np.ones(2))) for c, own in features.items()])
    with refused("a.h5", "client 'b'", feature, kind=DataError):
        open_hdf5(path)


def soft(file):
    file["examples/b/x"] = h5py.SoftLink("/examples/a/x")


def soft_client(file):
    file["examples/b"] = h5py.SoftLink("/examples/a")


def external(file):
    file["examples/b/x"] = h5py.ExternalLink("other.h5", "/examples/b/x")


def external_client(file):
    file["examples/b"] = h5py.ExternalLink("other.h5", "/examples/b")


def external_storage(file):
    raw = [(file.filename.replace("a.h5", "raw"), 0, 24)]
    file.create_dataset("examples/b/x", (3,), "f8", external=raw)


def virtual(file):
    layout = h5py.VirtualLayout((3,), "f8")
    layout[:] = h5py.VirtualSource("other.h5", "/examples/b/x", (3,))
    file.create_virtual_dataset("examples/b/x", layout)


@pytest.mark.parametrize(
    "link", [soft, soft_client, external, external_client, external_storage, virtual]
)
def test_what_is_not_in_the_file_itself_is_refused(tmp_path, cache, link):
    path = tmp_path / "a.h5"
    with h5py.File(path.with_name("other.h5"), "w") as other:
        other["examples/b/x"] = np.full(3, 7.0)
    np.full(3, 7.0).tofile(path.with_name("raw"))
    with h5py.File(path, "w") as file:
        file["examples/a/x"] = np.ones(3)
        link(file)
    with refused("a.h5", "client 'b'", kind=DataError):
        open_hdf5(path)


def test_clients_that_are_linked_from_elsewhere_are_refused(tmp_path, cache):
    path = tmp_path / "a.h5"
    write_hdf5(path.with_name("other.h5"), CLIENTS.items())
    with h5py.File(path, "w") as file:
        file["examples"] = h5py.ExternalLink("other.h5", "/examples")
    with refused("a.h5", "/examples", kind=DataError):
        open_hdf5(path)


@pytest.mark.parametrize(
    "claims",
    [
        {"shape": (10**9,), "chunks": (1000,)},
        {"shape": (10**9,), "chunks": (1000,), "compression": "gzip"},
        {"shape": (10**15,), "chunks": (1000,)},
        {"shape": (10**12,)},  # in one piece that was never written
        {"shape": (3,), "maxshape": (None,), "chunks": (2**28,)},
        {"shape": (10**18, 0), "maxshape": (None, None), "chunks": (1, 1)},
        {"shape": (100,), "dtype": "S100000000"},
    ],
)
@pytest.mark.parametrize("feature", ["first", "x"])  # sizes are read off the first
def test_claims_of_a_small_file_take_no_memory(tmp_path, cache, claims, feature):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        if feature != "first":
            file["examples/a/first"] = [1.0]
        file.create_dataset(f"examples/a/{feature}", **{"dtype": "f8"} | claims)
        if "maxshape" not in claims and claims.get("chunks"):
            file[f"examples/a/{feature}"][:5] = 1.0
    assert path.stat().st_size < 100_000
    with refused("a.h5", "client 'a'", f"'{feature}'", kind=DataError):
        open_hdf5(path).examples("a")


def test_one_data_set_of_many_names_is_counted_as_often(tmp_path, cache):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        group = file.create_group("examples/a")
        group.create_dataset("0", data=np.zeros(10**6), compression="gzip", chunks=(10**6,))
        for i in range(1, 100):
            group[str(i)] = group["0"]
    with refused("a.h5", "client 'a'", "800000000 bytes", kind=DataError):
        open_hdf5(path).examples("a")


def test_what_compresses_well_is_read(tmp_path, cache):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("examples/a/x", data=np.zeros((10**6, 2)), compression=9)
        file.create_dataset("examples/a/y", data=np.zeros(10**6, "u1"), compression=9, shuffle=True)
    assert path.stat().st_size < 100_000
    assert open_hdf5(path).examples("a")["x"].shape == (10**6, 2)


def test_types_that_are_neither_numbers_nor_text_are_refused(tmp_path, cache):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        lists = file.create_dataset("examples/a/x", (2,), h5py.vlen_dtype(np.int32))
        lists[:] = [[1, 2], [3]]
    with refused("a.h5", "client 'a'", "'x'", "object", kind=DataError):
        open_hdf5(path)


def test_a_heap_in_which_hdf5_would_never_end_is_refused(path):
    content = bytearray(path.read_bytes())
    at = content.index("wörd 1".encode())
    content[at - 16 : at] = bytes(16)  # its header: a free object of size 0
    path.write_bytes(content)
    with refused("set_train.h5", kind=DataError):
        open_hdf5(path)


def test_a_text_that_many_rows_share_is_not_read_for_each(tmp_path, cache, monkeypatch):
    path = tmp_path / "a.h5"
    long = "x" * 100_000
    write_hdf5(path, [("a", {"t": np.array([long] + ["y"] * 999, object)})])
    content = bytearray(path.read_bytes())
    rows = content.index((100_000).to_bytes(4, "little"))  # length, heap, number in the heap
    first = bytes(content[rows : rows + 16])
    assert content[rows + 16 : rows + 20] == (1).to_bytes(4, "little")
    monkeypatch.setattr(hdf5, "BLOCK", 1_000_000)
    whole = open_hdf5(path).examples("a")["t"].tolist()
    assert whole == [long] + ["y"] * 999  # in blocks of ten
    path.write_bytes(content.replace(content[rows : rows + 16000], first * 1000))
    with refused("a.h5", "client 'a'", kind=DataError):
        open_hdf5(path).examples("a")


def test_a_damaged_client_is_named(tmp_path, cache):
    """Checksums of compressed chunks find it."""
    path = tmp_path / "a.h5"
    values = np.random.default_rng(0).integers(0, 255, 5000).astype(np.uint8)
    with h5py.File(path, "w") as file:
        for name in "ab":
            file.create_dataset(f"examples/{name}/x", data=values, fletcher32=True, chunks=(5000,))
    content = bytearray(path.read_bytes())
    content[content.rindex(values.tobytes()[:50]) + 7] ^= 0xFF
    path.write_bytes(content)
    data = open_hdf5(path)
    np.testing.assert_array_equal(data.examples("a")["x"], values)
    with refused("a.h5", "client 'b'", kind=DataError):
        data.examples("b")


FULL = """
import resource, sys
import numpy as np
from fedpa.data.readers.hdf5 import write_hdf5
limit, size = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    write_hdf5(sys.argv[1], ((str(i), {"x": np.ones(size), "t": ["a"]}) for i in range(200)))
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize(("limit", "size"), [(0, 10), (3000, 10), (100_000, 10), (50_000, 20_000)])
def test_a_full_disk_is_the_systems_error_and_nothing_else(tmp_path, limit, size):
    """In a process of its own: HDF5 by itself would crash, or print errors nobody can catch."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "a.h5", str(limit), str(size)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"[Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}\n"
    assert not list(tmp_path.iterdir())


NAMES = ["a/b", "", ".", "a\0b", "\ud800", "a\udcffb"]


@pytest.mark.parametrize("name", NAMES)
def test_features_that_hdf5_would_not_give_back_are_refused(tmp_path, name):
    with refused("feature =", "client 'c'") as caught:
        write_hdf5(tmp_path / "a.h5", [("c", {"ok": np.ones(2), name: np.ones(2)})])
    assert str(caught.value).isprintable()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["a\0b", "\ud800", b"a\0b"])
def test_text_that_hdf5_would_not_give_back_is_refused(tmp_path, value):
    with refused("words =", "client 'c'"):
        write_hdf5(tmp_path / "a.h5", [("c", {"words": np.array(["ok", value], object)})])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_names_that_hdf5_would_take_for_paths_are_refused(tmp_path, name):
    with refused("client ="):
        write_hdf5(tmp_path / "a.h5", [("ok", client(1)), (name, client(1))])
    assert not list(tmp_path.iterdir())


def test_a_client_is_written_once(tmp_path):
    with refused("client = 'a'"):
        write_hdf5(tmp_path / "a.h5", [("a", client(1)), ("a", client(1))])


def test_several_threads_read(path):
    data = open_hdf5(path)
    with ThreadPoolExecutor(8) as pool:
        names = list(CLIENTS) * 30
        for name, arrays in zip(names, pool.map(data.examples, names), strict=True):
            same(arrays, CLIENTS[name])


def test_who_opens_it_again_closes_it_for_nobody(path, cache):
    first = open_hdf5(path)
    first.examples("a")
    shutil.rmtree(cache)
    second = open_hdf5(path)  # goes through the file, and closes it
    same(first.examples("b"), CLIENTS["b"])
    second.examples("a")
    del second
    same(first.examples("b"), CLIENTS["b"])


def test_a_process_that_was_forked_opens_the_file_anew(path, monkeypatch):
    data = open_hdf5(path)
    data.examples("a")
    opened = []
    file = h5py.File
    monkeypatch.setattr(h5py, "File", lambda *a, **k: opened.append(a) or file(*a, **k))
    data.examples("a")
    assert not opened
    monkeypatch.setattr(os, "getpid", lambda: -1)
    same(data.examples("b"), CLIENTS["b"])
    assert len(opened) == 1


def test_read_only_directories_will_do(path):
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        same(open_hdf5(path).examples("a"), CLIENTS["a"])
    finally:
        path.parent.chmod(0o755)


@pytest.mark.long
@pytest.mark.skipif("FEDPA_DATA" not in os.environ, reason="FEDPA_DATA names no real data")
def test_the_real_digits(cache):
    files = [f"fed_emnist_digitsonly_{split}.h5" for split in ("train", "test")]
    found = find(files, "fed_emnist_digitsonly", None)
    assert found is not None
    train, test = (open_hdf5(found[name]) for name in files)
    assert len(train.ids) == 836
    assert sum(map(train.num_examples, train.ids)) == 61_597
    assert sum(map(test.num_examples, test.ids)) == 8_403
    arrays = train.examples(train.ids[0])
    assert arrays["pixels"].shape == (train.num_examples(train.ids[0]), 28, 28)
    assert arrays["pixels"].dtype == np.float32
    assert set(arrays["label"]) <= set(range(10))


def test_without_h5py_the_message_says_what_installs_it(path):
    script = f"""
import sys
sys.modules["h5py"] = None
from fedpa.data.readers import open_hdf5
from fedpa.errors import FedpaError
try:
    open_hdf5({str(path)!r})
except FedpaError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("HDF5 files need h5py")
    assert "fedpa[experiments]" in done.stdout
