"""TensorFlow Federated's HDF5: `/examples/<client>/<feature>`, first axis the examples."""

import io
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.data.index import Index, indexed
from fedpa.data.kept import settle, stamp, whole
from fedpa.data.progress import progress
from fedpa.data.readers.clients import Arrays, Features, federation, text, wanted
from fedpa.errors import DataError, refuse

ROOT = "examples"
BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises, here or there, when a file is not as it should be."""
NAME = "text in Unicode without '/' or NUL, and not '.' or empty"


def open_hdf5(path: str | Path, features: Features = None) -> FederatedData:
    """The clients of a file. The first time it is gone through once to find their sizes.

    features: which are read: names, or {the name it shall have: its name in the file}; all unless
    told. Strings come as object arrays of `str`. The file is opened when the first client is read
    and stays open; any thread may read.
    """
    path = Path(path)
    index = indexed(path, "hdf5", lambda: _build(path))
    handle = _held(path, stamp(path))

    # Those of the first client that has any: all must have the same.
    names = wanted(features, index.notes["features"].tolist(), str(path))

    def read(name: str) -> Arrays:
        try:
            group = h5py.h5g.open(handle().root, name.encode())
            if not len(group):
                return {}
            return {new: _array(group, old.encode()) for new, old in names.items()}
        except DataError:
            raise
        except BROKEN as error:
            raise DataError(f"{path}: client {name!r} can't be read: {_line(error)}") from None

    return federation(path, index, read)


def write_hdf5(path: str | Path, clients: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Write (client, arrays by feature) in this layout. Text is kept as UTF-8 of any length.

    The file appears under its name when it is whole. The system's errors come as they are.
    """
    path = Path(path)
    with whole(path) as beside:
        made = beside / "made.h5"
        with made.open("w+b", buffering=0) as raw:
            disk = _Disk(raw)
            with h5py.File(disk, "w") as file:
                root = file.create_group(ROOT)
                for name, arrays in clients:
                    _write_client(root, name, arrays)
                    if disk.error is not None:
                        break
            if disk.error is not None:
                raise disk.error
        settle(made, path)


class _Disk(io.RawIOBase):
    """A file that does not fail while HDF5 has it: HDF5 may crash if it can't write what it must.

    What the system refuses is held in memory instead, from the first error on.
    """

    def __init__(self, raw: Any) -> None:
        self.raw, self.at, self.end = raw, 0, 0
        self.error: OSError | None = None
        self.held: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.end}[whence]
        return self.at

    def write(self, data: Any) -> int:
        size = len(data)
        if self.error is None:
            try:
                self.raw.seek(self.at)
                done = 0
                while done < size:  # a disk that is nearly full takes a part
                    done += self.raw.write(data[done:])
            except OSError as error:
                self.error = error
        if self.error is not None:
            self.held.append((self.at, bytes(data)))
        self.at += size
        self.end = max(self.end, self.at)
        return size

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self.end - self.at))
        self.raw.seek(self.at)
        found = self.raw.read(size)
        buffer[:size] = found + bytes(size - len(found))
        for at, data in self.held:
            first, last = max(at, self.at), min(at + len(data), self.at + size)
            if first < last:
                buffer[first - self.at : last - self.at] = data[first - at : last - at]
        self.at += size
        return size

    def truncate(self, size: int | None = None) -> int:
        size = self.at if size is None else size
        if self.error is None:
            try:
                self.raw.truncate(size)
            except OSError as error:
                self.error = error
        self.end = size
        return size


def _write_client(root: h5py.Group, name: str, arrays: Mapping[str, Any]) -> None:
    if not _is_name(name):
        raise refuse("client", name, f"must be {NAME}")
    if name in root:
        raise refuse("client", name, "is there twice")
    group = root.create_group(name)
    for feature, values in arrays.items():
        if not _is_name(feature):
            raise refuse("feature", feature, f"of client {name!r}: must be {NAME}")
        array = np.asarray(values)
        if array.dtype.kind not in "OU":
            group.create_dataset(feature, data=array)
            continue
        array = array.astype(object)
        bad = next((value for value in array.flat if not _is_text(value)), None)
        if bad is not None:
            raise refuse(feature, bad, f"of client {name!r}: must be text in Unicode without NUL")
        group.create_dataset(feature, data=array, dtype=h5py.string_dtype())


def _is_name(name: str) -> bool:
    """Whether HDF5 takes it for one name, and gives it back as it was."""
    return name not in ("", ".") and "/" not in name and _is_text(name)


def _is_text(value: object) -> bool:
    """Text without NUL, where HDF5's ends, or halves of characters. Bytes are taken as they are."""
    if isinstance(value, bytes):
        return b"\0" not in value
    if not isinstance(value, str):
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _open(path: Path) -> h5py.File:
    try:
        # Read-only: locks would only stop those who read from places that can't be written.
        return h5py.File(path, "r", locking=False)
    except BROKEN as error:
        raise DataError(
            f"{path} can't be opened, it is cut or no HDF5 file: {_line(error)}"
        ) from None


class _Held(NamedTuple):
    file: h5py.File
    root: Any
    """Its group of clients, opened once for all of them."""


def _held(path: Path, seen: str) -> Callable[[], _Held]:
    """Opens the file once for every process: one that was forked opens it anew."""
    lock = threading.Lock()
    files: dict[int, _Held] = {}

    def held() -> _Held:
        process = os.getpid()
        if process not in files:
            with lock:
                if process not in files:
                    if stamp(path) != seen:
                        raise DataError(f"{path} has changed since it was opened")
                    file = _open(path)
                    files[process] = _Held(file, file[ROOT].id)
        return files[process]

    return held


def _build(path: Path) -> Index:
    """Low-level calls: there may be hundreds of thousands of clients."""
    with _open(path) as file, progress(f"indexing {path.name}") as tell:
        try:
            root = file[ROOT].id
            names = list(root) if isinstance(root, h5py.h5g.GroupID) else None
        except BROKEN:
            names = None
        if names is None:
            raise DataError(f"{path} has no group /{ROOT}: it is not in the layout of TFF")
        ids, counts = [], np.zeros(len(names), np.int64)
        features: list[bytes] = []
        for i, name in enumerate(names):
            client = name.decode(errors="surrogateescape")
            try:
                if not features:
                    features = list(h5py.h5g.open(root, name))
                counts[i] = _count(root, name, features)
            except DataError as error:
                raise DataError(f"{path}: client {client!r} {error}") from None
            except BROKEN as error:
                why = _line(error)
                raise DataError(f"{path}: client {client!r} can't be read: {why}") from None
            ids.append(client)
            if i % 1000 == 0:
                tell(i, len(names))
        tell(len(names), len(names))
    found = [feature.decode() for feature in features]
    return Index(ids, counts, notes={"features": np.array(found, np.str_)})


def _count(root: Any, name: bytes, features: list[bytes]) -> int:
    """Examples of a client, by its first feature. A client without features has none."""
    if not features:
        return 0
    try:
        shape = h5py.h5d.open(root, name + b"/" + features[0]).shape
    except KeyError:
        if len(h5py.h5g.open(root, name)):
            raise DataError(f"has no feature {features[0].decode()!r}") from None
        return 0
    if not shape:
        raise DataError(f"has {features[0].decode()!r} of shape []: must have examples") from None
    return int(shape[0])


def _array(group: Any, feature: bytes) -> np.ndarray:
    """Low-level calls again: a client's few rows are read in a third of the time."""
    dataset = h5py.h5d.open(group, feature)
    kind, shape = dataset.dtype, dataset.shape
    array = np.empty(shape, kind)
    if array.size:
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, array)
    # Strings: of any length, or of a fixed one.
    if h5py.check_string_dtype(kind) is not None:
        return text(array.ravel().tolist(), shape)
    return array


def _line(error: Exception) -> str:
    """The error's text on one line. A KeyError shows its text in quotes."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(message.split())
