"""Finding a data set's files: unpacked, or in archives that are unpacked once into the cache."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa import places
from fedpa.data.cache import Tell, fill_directory, progress, stamp
from fedpa.data.size_limit import find_limit, over_limit
from fedpa.errors import DataError, FedpaError, explain, refuse

OPENERS: dict[str, Callable[[Any], Any]] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,  # the legacy format, and xz under that name: the first bytes tell which
    ".tar": lambda raw: raw,
}
ARCHIVES = (".tar.bz2", ".tar.gz", ".tgz", ".tar.xz", ".tar")
COMPRESSED = (".lzma", ".xz", ".gz", ".bz2")
CHUNK = 2**20
MAX_RATIO, MAX_UNPACKED, HARMLESS = 100, 2**38, 2**28
"""Bytes that one of an archive may become (the data sets' have at most 20), that all of them may,
and that are always unpacked. FEDPA_MAX_BYTES replaces them."""
LISTING = ".unpacked.json"
"""In every unpacked directory: its files and their sizes."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """A directory that can't be looked into is told in one line."""
    try:
        yield
    except OSError as error:
        raise FedpaError(f"{error.filename} can't be read: {explain(error)}") from None


@readable()
def searched(data_dir: str | Path | None) -> list[Path]:
    """Where data sets are looked for, in this order. A directory that was named is the only one."""
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise refuse("data_dir", str(data_dir), "must be a directory that exists")
        return [Path(data_dir)]
    own = os.environ.get("FEDPA_DATA")
    return [*([Path(own)] if own else []), places.user_data()]


@readable()
def find(
    files: Sequence[str],
    stems: Sequence[str],
    data_dir: str | Path | None,
    look_only: bool = False,
) -> dict[str, Path] | None:
    """Where each of `files` is, or None if none of the directories holds anything of them.

    stems: names of the archives that hold them, without `.tar.bz2` and the like. What is loose, in
    a directory or one level below, is preferred to archives. look_only: nothing is unpacked: what
    is packed is where its archive is, which is taken to be whole, and half a data set is None.
    """
    for directory in searched(data_dir):
        if directory.is_dir():
            found = _in_directory(directory, files, stems, look_only)
            if found:
                return found
    return None


def _in_directory(
    directory: Path, files: Sequence[str], stems: Sequence[str], look_only: bool
) -> dict[str, Path] | None:
    below = sorted(path for path in directory.iterdir() if path.is_dir())
    for place in (directory, *below):
        loose = _loose(place, files)
        if len(loose) == len(files):
            return {name: _taken(loose[name], look_only) for name in files}
    archives = [path for stem in stems if (path := _first(directory, stem, ARCHIVES))]
    if archives and look_only:
        return dict.fromkeys(files, archives[0])
    found = {name: path for path in archives for name, path in _from_archive(path, files).items()}
    # Half a data set is told rather than passed over. A sub-directory is the data set's only if it
    # bears its name: a train.bin may be anybody's.
    homes = [directory, *(place for place in below if place.name in stems)]
    partly = [place for place in homes if _loose(place, files)]
    for place in partly:
        for name, one in _loose(place, files).items():
            if name not in found:
                found[name] = _taken(one, look_only)
    missing = [name for name in files if name not in found]
    if not missing:
        return {name: found[name] for name in files}
    if (archives or partly) and not look_only:
        holders = ", ".join(str(path) for path in [*archives, *partly])
        raise DataError(f"{holders}: {', '.join(missing)} missing: the data set is incomplete")
    return None


def _taken(one: "_Once", look_only: bool) -> Path:
    return one.path if look_only else one()


class _Once(NamedTuple):
    """A file as it is, or compressed: unpacked when it is asked for."""

    path: Path
    packed: bool

    def __call__(self) -> Path:
        if not self.packed:
            return self.path
        return _unpacked(self.path, self.path.stem, _decompress) / self.path.stem


def _loose(place: Path, files: Sequence[str]) -> dict[str, _Once]:
    found = {}
    for name in files:
        if (place / name).is_file():
            found[name] = _Once(place / name, packed=False)
        elif path := _first(place, name, COMPRESSED):
            found[name] = _Once(path, packed=True)
    return found


def _first(place: Path, name: str, endings: Sequence[str]) -> Path | None:
    paths = (place / f"{name}{ending}" for ending in endings)
    return next((path for path in paths if path.is_file()), None)


def _from_archive(archive: Path, files: Sequence[str]) -> dict[str, Path]:
    """Those of the files that the archive holds, at whatever depth."""
    stem = next(archive.name.removesuffix(e) for e in ARCHIVES if archive.name.endswith(e))
    directory = _unpacked(archive, stem, _extract)
    found: dict[str, Path] = {}
    for path in sorted(directory.rglob("*"), key=lambda path: len(path.parts)):
        if path.name in files and path.is_file():
            found.setdefault(path.name, path)
    return found


def _unpacked(packed: Path, stem: str, unpack: Callable[[Any, Path, "_Reading"], None]) -> Path:
    """The directory in the cache that holds what is in `packed`."""

    def make(inside: Path) -> None:
        _unpack(packed, inside, unpack)
        (inside / LISTING).write_text(json.dumps(_sizes(inside)))

    target = places.cache() / "unpacked" / f"{stem}-{stamp(packed)}"
    return fill_directory(target, make, _is_complete)


def _is_complete(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / LISTING).read_text()) == _sizes(directory))
    except (OSError, ValueError):
        return False


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LISTING)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _unpack(packed: Path, inside: Path, unpack: Callable[[Any, Path, "_Reading"], None]) -> None:
    try:
        with progress(f"unpacking {packed.name}") as tell, packed.open("rb") as raw:
            stream = OPENERS[packed.suffix](raw)
            reading = _Reading(stream, raw, packed.stat().st_size, tell)
            unpack(packed, inside, reading)
            while reading.read(CHUNK):  # to the end, where the checksums are
                pass
            tell(reading.total, reading.total)
    except tarfile.FilterError as error:
        raise DataError(f"{packed} wants to write elsewhere: {error}") from None
    except (
        tarfile.TarError,
        EOFError,
        lzma.LZMAError,
        zlib.error,
        MemoryError,
        ValueError,
    ) as error:
        if isinstance(error, FedpaError):
            raise
        raise _cut(packed) from None  # MemoryError: the size of a dictionary that is damaged
    except OSError as error:
        if error.errno is None:  # what bz2 and gzip raise; the system's errors have a number
            raise _cut(packed) from None
        if error.filename == str(packed):
            raise FedpaError(f"{packed} can't be read: {explain(error)}") from None
        raise


class _Reading:
    """Reads a compressed file and tells how far it is, in bytes of that file.

    One that becomes much larger than it is, is refused: it would fill the disk.
    """

    def __init__(self, stream: Any, raw: Any, total: int, tell: Tell) -> None:
        self.stream, self.raw, self.total, self.tell, self.told = stream, raw, total, tell, 0
        self.limit = find_limit(total, ratio=MAX_RATIO, most=MAX_UNPACKED, least=HARMLESS)
        self.unpacked = 0

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self.stream.read(size)
        self.unpacked += len(data)
        if self.unpacked > self.limit:
            raise over_limit(self.raw.name, "unpacks to more bytes", self.total, self.limit)
        if (at := self.raw.tell()) >= self.told + CHUNK:
            self.told = at
            self.tell(at, self.total)
        return data


def _extract(archive: Path, inside: Path, reading: _Reading) -> None:
    # As a stream, for tarfile's own decompression takes a file that is cut for one that ends.
    with tarfile.open(fileobj=reading, mode="r|") as tar:  # type: ignore[call-overload]
        for member in tar:
            if member.issparse():  # of any size, in no bytes
                raise DataError(f"{archive}: {member.name!r} is sparse: must have all its bytes")
            tar.extract(member, inside, filter="data")
        if archive.suffix == ".tar" and archive.stat().st_size < tar.offset + tarfile.BLOCKSIZE:
            raise _cut(archive)  # between two files, where only the closing block tells


def _decompress(packed: Path, inside: Path, reading: _Reading) -> None:
    with (inside / packed.stem).open("wb") as out:
        shutil.copyfileobj(reading, out, CHUNK)


def _cut(path: Path) -> DataError:
    return DataError(f"{path} is cut or corrupt: download it again")
