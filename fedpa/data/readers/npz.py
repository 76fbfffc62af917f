"""A folder with one `<client>.npz` for every client, as numpy.savez writes it."""

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedpa.data.cache import Index, load_index
from fedpa.data.federated import FederatedData
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_text,
    check_size,
    choose_features,
    index_clients,
    make_federation,
    refuse_damaged,
)
from fedpa.errors import DataError

ENDING = ".npz"


def open_npz(directory: str | Path, features: Features = None) -> FederatedData:
    """Open a directory with one `<client>.npz` for every client, as `numpy.savez` writes it.

    Sizes are read off the headers of the arrays, once. All clients must have the same arrays. Text
    comes as object arrays of `str`; pickled objects are refused.

    Args:
        directory: The directory.
        features: Which are read: names, or {the name it shall have: its name in the file}; default:
            all.
    Returns:
        The federation; a client is read when it is asked for.
    Raises:
        DataError: A file is damaged, or clients differ.
    Example:
        >>> Path("clients").mkdir()
        >>> np.savez("clients/a.npz", x=np.zeros((3, 2)))
        >>> open_npz("clients").num_examples("a")
        3
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    index = load_index(directory, "npz", lambda: _build(directory))
    names = choose_features(features, index.notes["features"].tolist(), str(directory))
    return make_federation(
        directory, index, lambda name: read_npz(directory / f"{name}{ENDING}", names)
    )


def read_npz(path: Path, features: Features = None) -> Arrays:
    """Read the arrays of a file, or those of `features`. Pickled objects are refused."""
    with _open(path) as archive:
        headers = _read_headers(path, archive)
        names = choose_features(features, headers, str(path))
        return {
            new: _read_array(f"{path}: array {old!r}", archive, headers[old].member)
            for new, old in names.items()
        }


class _Header(NamedTuple):
    member: zipfile.ZipInfo
    shape: tuple[int, ...]


@contextlib.contextmanager
def _open(path: Path) -> Iterator[zipfile.ZipFile]:
    with refuse_damaged(f"{path} is truncated or not a .npz file"):
        with path.open("rb") as file:
            if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                raise DataError(f"{path} is one array without a name: save it with numpy.savez")
        archive = zipfile.ZipFile(path)
    with archive:
        yield archive


def _read_headers(path: Path, archive: zipfile.ZipFile) -> dict[str, _Header]:
    """The arrays' headers by name: no array is read before its header and its sizes agree."""
    members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
    if not members:
        raise DataError(f"{path} has no arrays: it may be damaged")
    if len(members) != len(archive.infolist()):
        raise DataError(f"{path} has arrays of the same name")
    size = path.stat().st_size
    # Members may overlap, so that each is small enough and all are not.
    check_size(str(path), sum(member.file_size for member in members.values()), size)
    return {
        name: _Header(member, _read_shape(f"{path}: array {name!r}", archive, member, size))
        for name, member in members.items()
    }


def _read_shape(
    where: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo, stored: int
) -> tuple[int, ...]:
    # Of a header that is damaged, NumPy raises all that parsers raise.
    with refuse_damaged(f"{where} can't be read"), archive.open(member) as file:
        if np.lib.format.read_magic(file) == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        if dtype.hasobject:
            raise DataError(f"{where} has pickled objects: must be numbers or text")
        size = math.prod(shape) * dtype.itemsize
        there = member.file_size - file.tell()
        if min(shape, default=0) < 0 or size != there:
            raise DataError(
                f"{where} has {there} bytes: its header says {size} ({dtype} of shape "
                f"{list(shape)})"
            )
        check_size(where, max(size, *shape[:1], 0), min(member.compress_size, stored))
        return tuple(shape)


def _read_array(where: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with refuse_damaged(f"{where} can't be read"), archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # to the end, where the checksum is
    return as_text(array) if array.dtype.kind in "US" else array


def _build(directory: Path) -> Index:
    ids = sorted(p.stem for p in directory.iterdir() if p.suffix == ENDING and p.is_file())
    if not ids:
        raise DataError(f"{directory} has no {ENDING} files")

    def look(name: str) -> tuple[list[str], int]:
        path = directory / f"{name}{ENDING}"
        with _open(path) as archive:
            shapes = {key: header.shape for key, header in _read_headers(path, archive).items()}
        lengths = {shape[0] if shape else -1 for shape in shapes.values()}
        if len(lengths) > 1 or -1 in lengths:
            shown = {feature: list(shape) for feature, shape in shapes.items()}
            raise DataError(f"{path} has arrays of shapes {shown}: must have one first axis")
        return sorted(shapes), lengths.pop()

    return index_clients(directory, ids, look)
