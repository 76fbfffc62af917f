import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedpa.data import archives
from fedpa.data.archives import find, list_places
from fedpa.data.cache import LISTING, settle, show_progress
from fedpa.errors import DataError
from tests.refusals import refused

FILES = ("set_train.h5", "set_test.h5")
STEM = "set"
PACK = {
    ".tar.bz2": bz2.compress,
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.xz": lzma.compress,
    ".tar": lambda data: data,
}


def tarred(contents):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in contents.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def content():
    noise = os.urandom(3000)  # so that compressed files are long enough to be cut anywhere
    return {name: name.encode() + noise for name in FILES}


def left_behind(cache):
    return list((cache / "unpacked").rglob("*")) if cache.exists() else []


@pytest.fixture
def directory(homes):
    path = homes / "data"
    path.mkdir()
    return path


def test_a_link_to_a_member_that_is_not_there_is_refused(directory, cache):
    with tarfile.open(directory / f"{STEM}.tar", "w") as tar:
        info = tarfile.TarInfo(FILES[0])
        info.type, info.linkname = tarfile.LNKTYPE, "nowhere"
        tar.addfile(info)
    with refused(str(directory / f"{STEM}.tar"), kind=DataError):
        find(FILES, STEM, directory)


def test_nothing_is_found_where_nothing_is(homes, directory):
    assert find(FILES, STEM, None) is None
    assert find(FILES, STEM, directory) is None


@pytest.mark.parametrize("below", ["", "set", "anything"])
def test_loose_files(directory, below):
    (directory / below).mkdir(exist_ok=True)
    for name in FILES:
        (directory / below / name).write_bytes(b"x")
    assert find(FILES, STEM, str(directory)) == {n: directory / below / n for n in FILES}


def test_the_order_of_places(homes, monkeypatch):
    share, own, named = homes / "share" / "fedpa", homes / "own", homes / "named"
    assert list_places(None) == [share]
    monkeypatch.setenv("FEDPA_DATA", str(own))
    assert list_places(None) == [own, share]
    named.mkdir()
    assert list_places(named) == [named]
    for place in (share, own):
        place.mkdir(parents=True)
        for name in FILES:
            (place / name).write_bytes(b"x")
    assert find(FILES, STEM, None)[FILES[0]].parent == own
    assert find(FILES, STEM, named) is None


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_data_dir_must_be_a_directory(homes, name):
    (homes / "file").write_bytes(b"")
    with refused("data_dir ="):
        find(FILES, STEM, homes / name)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("inside", ["", "some/depth/"])
def test_archives_are_unpacked_once(directory, cache, ending, inside):
    held = content()
    packed = tarred({inside + name: data for name, data in held.items()})
    (directory / f"set{ending}").write_bytes(PACK[ending](packed))
    found = find(FILES, STEM, directory)
    assert {name: path.read_bytes() for name, path in found.items()} == held
    assert all(path.is_relative_to(cache / "unpacked") for path in found.values())
    before = found[FILES[0]].stat().st_ino
    assert find(FILES, STEM, directory) == found
    assert found[FILES[0]].stat().st_ino == before


def test_a_file_that_somebody_took_from_the_cache_is_unpacked_again(directory):
    (directory / "set.tar").write_bytes(tarred(content()))
    find(FILES, STEM, directory)[FILES[0]].unlink()
    assert find(FILES, STEM, directory)[FILES[0]].is_file()


def test_an_archive_that_changed_is_unpacked_anew(directory):
    (directory / "set.tar").write_bytes(tarred(content()))
    first = find(FILES, STEM, directory)
    (directory / "set.tar").write_bytes(tarred(dict.fromkeys(FILES, b"new")))
    second = find(FILES, STEM, directory)
    assert first != second
    assert second[FILES[1]].read_bytes() == b"new"


def test_an_archive_without_one_of_the_files_is_told(directory):
    (directory / "set.tar.gz").write_bytes(gzip.compress(tarred({FILES[0]: b"x"})))
    with refused("set.tar.gz", "set_test.h5", kind=DataError):
        find(FILES, STEM, directory)
    (directory / FILES[1]).write_bytes(b"y")
    assert {path.read_bytes() for path in find(FILES, STEM, directory).values()} == {b"x", b"y"}


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".lzma", lambda data: lzma.compress(data, lzma.FORMAT_ALONE)),
        (".lzma", lzma.compress),
        (".xz", lzma.compress),
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
    ],
)
def test_single_files_are_decompressed(directory, cache, ending, compress):
    data = os.urandom(2000)
    packed = directory / f"set.sqlite{ending}"
    packed.write_bytes(compress(data))
    assert find(["set.sqlite"], STEM, directory)["set.sqlite"].read_bytes() == data
    packed.write_bytes(compress(data)[:-7])
    with refused("set.sqlite", kind=DataError):
        find(["set.sqlite"], STEM, directory)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_cut_archive_is_refused_and_nothing_is_left(directory, cache, ending, share):
    whole = PACK[ending](tarred(content()))
    if ending == ".tar":
        whole = whole[:7168]  # without the padding to a record, of which any part may be missing
    archive = directory / f"set{ending}"
    archive.write_bytes(whole[: int(share * len(whole))])
    with refused(f"set{ending}", kind=DataError):
        find(FILES, STEM, directory)
    assert not left_behind(cache)


def test_a_tar_that_ends_between_two_files_is_cut(directory):
    whole = tarred(content())
    (directory / "set.tar").write_bytes(whole[: 512 + 512 * 6])
    with refused("set.tar", kind=DataError):
        find(FILES, STEM, directory)


@pytest.mark.parametrize("ending", [".tar.bz2", ".tar.gz", ".tar.xz"])
def test_a_damaged_archive_is_refused(directory, cache, ending):
    data = bytearray(PACK[ending](tarred(content())))
    data[len(data) // 2] ^= 0xFF
    (directory / f"set{ending}").write_bytes(data)
    with refused("set.tar", kind=DataError):
        find(FILES, STEM, directory)
    assert not left_behind(cache)


def test_no_archive_writes_elsewhere(directory, cache):
    (directory / "set.tar").write_bytes(tarred({"../../escaped": b"x"}))
    with refused("set.tar", kind=DataError):
        find(FILES, STEM, directory)
    assert not left_behind(cache)


@pytest.mark.parametrize("packed", ["set.tar.gz", "set.tar.bz2", "set.tar.xz"])
def test_a_small_archive_does_not_fill_the_disk(directory, cache, monkeypatch, packed):
    monkeypatch.setattr(archives, "HARMLESS", 10**6)
    data = tarred(dict.fromkeys(FILES, bytes(5 * 10**6)))
    (directory / packed).write_bytes(PACK[packed.removeprefix("set")](data))
    with refused(packed, "FEDPA_MAX_BYTES", kind=DataError):
        find(FILES, STEM, directory)
    assert not left_behind(cache)
    monkeypatch.setenv("FEDPA_MAX_BYTES", str(2 * 10**7))
    assert find(FILES, STEM, directory)[FILES[0]].stat().st_size == 5 * 10**6


def test_a_small_file_does_not_fill_the_disk(directory, cache, monkeypatch):
    monkeypatch.setattr(archives, "HARMLESS", 10**6)
    (directory / "set.sqlite.lzma").write_bytes(lzma.compress(bytes(10**7)))
    with refused("set.sqlite.lzma", kind=DataError):
        find(["set.sqlite"], STEM, directory)
    assert not left_behind(cache)


def test_what_compresses_as_data_sets_do_is_unpacked(directory, monkeypatch):
    monkeypatch.setattr(archives, "HARMLESS", 0)
    data = os.urandom(10_000) + bytes(190_000)
    (directory / "set.tar.bz2").write_bytes(bz2.compress(tarred(dict.fromkeys(FILES, data))))
    assert find(FILES, STEM, directory)[FILES[0]].read_bytes() == data


def test_sparse_files_are_refused(directory, cache):
    info = tarfile.TarInfo(FILES[0])
    info.size = 512
    info.pax_headers = {"GNU.sparse.map": "0,512", "GNU.sparse.size": str(10**15)}
    with tarfile.open(directory / "set.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(bytes(512)))
    with refused("set.tar", "'set_train.h5'", kind=DataError):
        find(FILES, STEM, directory)
    assert not left_behind(cache)


@pytest.mark.parametrize("below", ["", "set"])
def test_a_missing_split_is_told(directory, below):
    (directory / below).mkdir(exist_ok=True)
    (directory / below / FILES[0]).write_bytes(b"x")
    with refused("set_test.h5", kind=DataError):
        find(FILES, STEM, directory)
    (directory / "set.tar").write_bytes(tarred(content()))
    assert find(FILES, STEM, directory)[FILES[0]].read_bytes() != b"x"  # both of one kind


def test_splits_may_lie_in_the_directory_and_the_data_sets_own(directory):
    (directory / "set").mkdir()
    paths = {FILES[0]: directory / "set" / FILES[0], FILES[1]: directory / FILES[1]}
    for path in paths.values():
        path.write_bytes(b"x")
    assert find(FILES, STEM, directory) == paths
    assert find(FILES, STEM, directory, look_only=True) == paths


def test_who_only_looks_unpacks_nothing_and_finds_no_halves(directory, cache):
    (directory / FILES[0]).write_bytes(b"x")
    assert find(FILES, STEM, directory, look_only=True) is None
    (directory / f"{FILES[1]}.gz").write_bytes(gzip.compress(b"x"))
    found = find(FILES, STEM, directory, look_only=True)
    assert found == {FILES[0]: directory / FILES[0], FILES[1]: directory / f"{FILES[1]}.gz"}
    (directory / FILES[0]).unlink()
    (directory / "set.tar").write_bytes(tarred(content()))
    found = find(FILES, STEM, directory, look_only=True)
    assert found == dict.fromkeys(FILES, directory / "set.tar")
    assert not cache.exists()


def test_half_of_something_elsewhere_is_nothing(directory):
    (directory / "other").mkdir()
    (directory / "other" / FILES[0]).write_bytes(b"x")
    assert find(FILES, STEM, directory) is None


def test_downloads_under_way_are_not_taken(directory):
    (directory / "set.tar.bz2.part").write_bytes(bz2.compress(tarred(content())))
    (directory / f"{FILES[0]}.part").write_bytes(b"x")
    assert find(FILES, STEM, directory) is None


def test_two_at_once(directory):
    (directory / "set.tar.gz").write_bytes(gzip.compress(tarred(content())))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: find(FILES, STEM, directory), range(8)))
    assert all(one == found[0] for one in found)
    assert found[0][FILES[0]].is_file()


def test_who_comes_second_takes_what_is_there(directory, monkeypatch):
    """The other process settles between our look and our own settling."""
    (directory / "set.tar").write_bytes(tarred(content()))

    def slower(made, target):
        target.mkdir()
        (target / FILES[0]).write_bytes(b"theirs")
        (target / FILES[1]).write_bytes(b"theirs")
        (target / LISTING).write_text(json.dumps(dict.fromkeys(FILES, len(b"theirs"))))
        settle(made, target)

    monkeypatch.setattr("fedpa.data.cache.settle", slower)
    assert find(FILES, STEM, directory)[FILES[0]].read_bytes() == b"theirs"


def test_an_unwritable_cache_is_told(directory, cache):
    (directory / "set.tar").write_bytes(tarred(content()))
    cache.parent.write_bytes(b"a file where the directory would be")
    with refused("XDG_CACHE_HOME"):
        find(FILES, STEM, directory)


def test_a_full_disk_is_told(directory, cache, monkeypatch):
    (directory / "set.tar").write_bytes(tarred(content()))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extract", full)
    with refused("No space left on device"):
        find(FILES, STEM, directory)
    assert not left_behind(cache)


def test_progress_is_in_bytes_of_the_archive(directory):
    held = {name: os.urandom(3_000_000) for name in FILES}
    archive = directory / "set.tar.gz"
    archive.write_bytes(gzip.compress(tarred(held), 1))
    told = []

    @contextlib.contextmanager
    def listener(what):
        told.append(what)
        yield lambda done, total: told.append((done, total))

    with show_progress(listener):
        find(FILES, STEM, directory)
    size = archive.stat().st_size
    assert told[0] == "unpacking set.tar.gz"
    assert told[-1] == (size, size)
    assert len(told) > 4
    assert [done for done, _ in told[1:]] == sorted(done for done, _ in told[1:])
