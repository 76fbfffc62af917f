"""A folder with one `<client>.npz` for every client, as numpy.savez writes it."""

import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpa.data.cache import Index, load_index, progress
from fedpa.data.federated import FederatedData
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_text,
    choose_features,
    describe,
    make_federation,
    show_names,
)
from fedpa.data.size_limit import check_size
from fedpa.errors import DataError, explain

ENDING = ".npz"


def open_npz(directory: str | Path, features: Features = None) -> FederatedData:
    """The clients of a folder. Their sizes are read off the headers of the arrays, once.

    features: which are read: names, or {the name it shall have: its name in the files}; all unless
    told. All clients must have the same arrays. Text comes as object arrays of `str`; pickled
    objects are refused.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory")
    index = load_index(directory, "npz", lambda: _build(directory))
    names = choose_features(features, index.notes["features"].tolist(), str(directory))

    def read(name: str) -> Arrays:
        arrays = read_npz(directory / f"{name}{ENDING}", set(names.values()))
        return {new: _plain(arrays[old]) for new, old in names.items()}

    return make_federation(directory, index, read)


def read_npz(path: Path, features: Collection[str] | None = None) -> Arrays:
    """The arrays of a file by name, or those of `features`. Pickled objects are refused."""
    with _Members(path) as members:
        there = members.headers()
        chosen = there if features is None else features
        for feature in chosen:
            if feature not in there:
                raise DataError(
                    f"{path} has no feature {feature!r}: there are {show_names(list(there))}"
                )
        return {feature: members.array(feature) for feature in chosen}


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class _Members:
    """The arrays of a file: none is read before its header and its sizes agree."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> "_Members":
        try:
            self.size = self.path.stat().st_size
            with self.path.open("rb") as file:
                if file.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                    raise DataError(
                        f"{self.path} is one array without a name: save it with numpy.savez"
                    )
            self.archive = zipfile.ZipFile(self.path)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {explain(error)}") from None
        except DataError:
            raise
        except Exception as error:  # zipfile raises every kind for a file that is damaged
            raise DataError(
                f"{self.path} can't be read, it is cut or no npz file: {describe(error)}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        self.archive.close()

    def headers(self) -> dict[str, _Header]:
        """Shapes and types by name, all of them checked."""
        members = self.archive.infolist()
        names = [member.filename.removesuffix(".npy") for member in members]
        if not members:
            raise DataError(f"{self.path} has no arrays: it may be damaged")
        if len(set(names)) != len(names):
            raise DataError(f"{self.path} has arrays of the same name")
        self.members = dict(zip(names, members, strict=True))
        # Members may overlap, so that each is small enough and all are not.
        check_size(str(self.path), sum(member.file_size for member in members), self.size)
        return {name: self._read(name, self._header) for name in names}

    def array(self, name: str) -> np.ndarray:
        return self._read(name, self._array)

    def _read(self, name: str, read: Any) -> Any:
        where = f"{self.path}: array {name!r}"
        try:
            with self.archive.open(self.members[name]) as file:
                return read(where, file, self.members[name])
        except DataError:
            raise
        except Exception as error:  # NumPy too: of a header that is damaged, all that parsers raise
            raise DataError(f"{where} can't be read: {describe(error)}") from None

    def _header(self, where: str, file: Any, member: zipfile.ZipInfo) -> _Header:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
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
        check_size(where, max(size, *shape[:1], 0), min(member.compress_size, self.size))
        return _Header(shape, dtype)

    def _array(self, _: str, file: Any, __: zipfile.ZipInfo) -> np.ndarray:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # to the end, where the checksum is
        return array


def _build(directory: Path) -> Index:
    files = sorted(path for path in directory.iterdir() if path.suffix == ENDING and path.is_file())
    if not files:
        raise DataError(f"{directory} has no {ENDING} files")
    counts = np.zeros(len(files), np.int64)
    features: list[str] = []
    with progress(f"indexing {directory.name}") as tell:
        for i, path in enumerate(files):
            with _Members(path) as members:
                shapes = {name: header.shape for name, header in members.headers().items()}
            features = features or sorted(shapes)
            if sorted(shapes) != features:
                raise DataError(
                    f"{path} has arrays {show_names(sorted(shapes))}: {files[0].name} has "
                    f"{show_names(features)}, and all clients must have the same"
                )
            counts[i] = _count(path, shapes)
            tell(i + 1, len(files))
    notes = {"features": np.array(features, np.str_)}
    return Index([path.stem for path in files], counts, notes=notes)


def _count(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    lengths = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(lengths) > 1 or -1 in lengths:
        shown = {name: list(shape) for name, shape in shapes.items()}
        raise DataError(f"{path} has arrays of shapes {shown}: must have one first axis in common")
    return lengths.pop()


def _plain(array: np.ndarray) -> Any:
    if array.dtype.kind in "US":
        return as_text(array.ravel().tolist(), array.shape)
    return array
