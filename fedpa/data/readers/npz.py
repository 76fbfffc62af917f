"""A folder with one `<client>.npz` for every client, as numpy.savez writes it."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.index import Index, indexed
from fedpa.data.progress import progress
from fedpa.data.readers.clients import Arrays, Features, federation, text, wanted
from fedpa.errors import DataError

ENDING = ".npz"
BROKEN = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def open_npz(directory: str | Path, features: Features = None) -> FederatedData:
    """The clients of a folder. Their sizes are read off the headers of the arrays, once.

    features: which are read: names, or {the name it shall have: its name in the files}; all unless
    told. Text comes as object arrays of `str`; pickled objects are refused.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    index = indexed(directory, "npz", lambda: _build(directory))

    def read(name: str) -> Arrays:
        path = directory / f"{name}{ENDING}"
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                names = wanted(features, arrays.files, str(path))
                return {new: _plain(arrays[old]) for new, old in names.items()}
        except DataError:
            raise
        except BROKEN as error:
            raise _broken(path, error) from None

    return federation(directory, index, read)


def _build(directory: Path) -> Index:
    files = [path for path in directory.iterdir() if path.suffix == ENDING and path.is_file()]
    if not files:
        raise DataError(f"{directory} has no {ENDING} files")
    counts = np.zeros(len(files), np.int64)
    with progress(f"indexing {directory.name}") as tell:
        for i, path in enumerate(files):
            counts[i] = _count(path)
            tell(i + 1, len(files))
    return Index([path.stem for path in files], counts)


def _count(path: Path) -> int:
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {name: _shape(archive, name) for name in archive.namelist()}
    except BROKEN as error:
        raise _broken(path, error) from None
    lengths = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(lengths) > 1 or -1 in lengths:
        shown = {name.removesuffix(".npy"): list(shape) for name, shape in shapes.items()}
        raise DataError(f"{path} has arrays of shapes {shown}: must have one first axis in common")
    return lengths.pop() if lengths else 0


def _shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with archive.open(name) as member:
        version = np.lib.format.read_magic(member)
        if version == (1, 0):
            shape, _, _ = np.lib.format.read_array_header_1_0(member)
        else:
            shape, _, _ = np.lib.format.read_array_header_2_0(member)
    return tuple(shape)


def _plain(array: np.ndarray) -> Any:
    if array.dtype.kind in "US":
        return text(array.ravel().tolist(), array.shape)
    return array


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} can't be read, it is cut or no npz file: {error}")
