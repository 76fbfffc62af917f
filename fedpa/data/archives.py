"""Finding a data set's files: unpacked, or in archives that are unpacked once into the cache."""

import bz2
import contextlib
import gzip
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpa import places
from fedpa.data.cache import Tell, fill_directory, progress, stamp
from fedpa.data.readers.reader import check_size, find_limit
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
BROKEN = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, ValueError, KeyError)
"""What is raised for an archive that is damaged; KeyError: it has a link to a file it has not."""
CHUNK = 2**20
MAX_RATIO, MAX_UNPACKED, HARMLESS = 100, 2**38, 2**28
"""Bytes that one of an archive may become (the data sets' have at most 20), that all of them may,
and that are always unpacked. FEDPA_MAX_BYTES replaces them."""


@contextlib.contextmanager
def refuse_unreadable() -> Iterator[None]:
    """Refuse a directory that can't be looked into."""
    try:
        yield
    except OSError as error:
        raise FedpaError(f"{error.filename} can't be read: {explain(error)}") from None


@refuse_unreadable()
def list_places(data_dir: str | Path | None) -> list[Path]:
    """Where data sets are looked for, in this order. A directory that was named is the only one."""
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            wrong = "is not a directory" if Path(data_dir).exists() else "no such directory"
            raise refuse("data_dir", str(data_dir), wrong)
        return [Path(data_dir)]
    own = os.environ.get("FEDPA_DATA")
    return [*([Path(own)] if own else []), places.user_data()]


@refuse_unreadable()
def find(
    files: Sequence[str], stem: str, data_dir: str | Path | None, look_only: bool = False
) -> dict[str, Path] | None:
    """Find where each of `files` is; None if none of the directories holds anything of them.

    Args:
        stem: Name of the archive that holds them, without `.tar.bz2` and the like. What is loose,
            in a directory or one level below, is preferred to it.
        look_only: Unpack nothing: what is packed is where its archive is, which is taken to be
            whole, and half a data set is None.
    """
    for directory in list_places(data_dir):
        if directory.is_dir():
            paths = _find_in(directory, files, stem, look_only)
            if paths:
                return paths
    return None


def _find_in(
    directory: Path, files: Sequence[str], stem: str, look_only: bool
) -> dict[str, Path] | None:
    below = sorted(path for path in directory.iterdir() if path.is_dir())
    loose = {place: _find_loose(place, files) for place in (directory, *below)}
    homes = [place for place, own in loose.items() if len(own) == len(files)][:1]
    paths: dict[str, Path] = {}
    archive = None
    if not homes:
        # A sub-directory is the data set's only if it bears its name: a train.bin may be anybody's.
        homes = [place for place in (directory, directory / stem) if loose.get(place)]
        archive = _find_first(directory, stem, ARCHIVES)
    if archive is not None:
        if look_only:
            return dict.fromkeys(files, archive)
        paths = _unpack_archive(archive, files)
    for place in homes:
        for name, path in loose[place].items():
            if name not in paths:
                paths[name] = path if look_only else _unpack_file(path, name)
    missing = [name for name in files if name not in paths]
    if not missing:
        return {name: paths[name] for name in files}
    holders = [str(path) for path in (archive, *homes) if path is not None]
    if holders and not look_only:  # an incomplete data set is reported, not ignored
        lacking = ", ".join(missing)
        raise DataError(f"{', '.join(holders)}: {lacking} missing: the data set is incomplete")
    return None


def _find_loose(place: Path, files: Sequence[str]) -> dict[str, Path]:
    """Those of the files that are in a directory, as they are or compressed."""
    paths = {name: _find_first(place, name, ("", *COMPRESSED)) for name in files}
    return {name: path for name, path in paths.items() if path is not None}


def _find_first(place: Path, name: str, endings: Sequence[str]) -> Path | None:
    paths = (place / f"{name}{ending}" for ending in endings)
    return next((path for path in paths if path.is_file()), None)


def _unpack_file(path: Path, name: str) -> Path:
    return path if path.name == name else _unpack_once(path, name, _decompress) / name


def _unpack_archive(archive: Path, files: Sequence[str]) -> dict[str, Path]:
    """Those of the files that the archive holds, at whatever depth."""
    stem = next(archive.name.removesuffix(e) for e in ARCHIVES if archive.name.endswith(e))
    directory = _unpack_once(archive, stem, _extract)
    paths: dict[str, Path] = {}
    for path in sorted(directory.rglob("*"), key=lambda path: len(path.parts)):
        if path.name in files and path.is_file():
            paths.setdefault(path.name, path)
    return paths


def _unpack_once(packed: Path, stem: str, unpack: Callable[[Any, Path, "_Reading"], None]) -> Path:
    """The directory in the cache that holds what is in `packed`."""
    target = places.cache() / "unpacked" / f"{stem}-{stamp(packed)}"
    return fill_directory(target, lambda inside: _unpack(packed, inside, unpack))


def _unpack(packed: Path, inside: Path, unpack: Callable[[Any, Path, "_Reading"], None]) -> None:
    try:
        with progress(f"unpacking {packed.name}") as tell, packed.open("rb") as raw:
            stream = OPENERS[packed.suffix](raw)
            reading = _Reading(stream, raw, packed.stat().st_size, tell)
            unpack(packed, inside, reading)
            while reading.read(CHUNK):  # to the end, where the checksums are
                pass
            tell(reading.total, reading.total)
    except FedpaError:
        raise
    except tarfile.FilterError as error:
        raise DataError(f"{packed} wants to write elsewhere: {error}") from None
    except (*BROKEN, MemoryError):  # MemoryError: the size of a dictionary that is damaged
        raise _make_damaged_error(packed) from None
    except OSError as error:
        if error.errno is None:  # what bz2 and gzip raise; the system's errors have a number
            raise _make_damaged_error(packed) from None
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
        check_size(f"{self.raw.name}, unpacked,", self.unpacked, self.total, self.limit)
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
            raise _make_damaged_error(
                archive
            )  # between two files, where only the closing block tells


def _decompress(packed: Path, inside: Path, reading: _Reading) -> None:
    with (inside / packed.stem).open("wb") as out:
        shutil.copyfileobj(reading, out, CHUNK)


def _make_damaged_error(path: Path) -> DataError:
    return DataError(f"{path} is truncated or corrupt: download it again")
