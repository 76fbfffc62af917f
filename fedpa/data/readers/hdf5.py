"""TensorFlow Federated's HDF5: `/examples/<client>/<feature>`, first axis the examples."""

import contextlib
import functools
import io
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpa.data.cache import Index, load_index, progress, settle, stage, stamp
from fedpa.data.federated import FederatedData
from fedpa.data.partition import Partition
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_text,
    choose_features,
    describe,
    import_optional,
    make_federation,
)
from fedpa.data.size_limit import check_size
from fedpa.errors import DataError, refuse

ROOT = "examples"
BROKEN = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""What h5py raises, here or there, when a file is not as it should be."""
BLOCK = 2**26
"""Bytes of text that are read at once."""
HEAP, HEAP_LEAST, OBJECT, OBJECTS = b"GCOL\1\0\0\0", 4096, 16, 2**16
"""Where text lies in a file: the bytes that a heap begins with, its least size, the bytes of an
object's header, and how many objects a heap can have."""
NAME = "text in Unicode without '/' or NUL, and not '.' or empty"


def open_hdf5(path: str | Path, features: Features = None) -> FederatedData:
    """The clients of a file. The first time it is gone through once to find their sizes.

    features: which are read: names, or {the name it shall have: its name in the file}; all unless
    told. All clients must have the same. Strings come as object arrays of `str`. The file is opened
    when the first client is read and stays open; any thread may read. Links, data sets in other
    files and ones that claim more than the file can hold are refused.
    """
    path = Path(path)
    index = load_index(path, "hdf5", lambda: _build(path))
    handle = _held(path, stamp(path))
    longest = int(index.notes["longest"])

    # Those of the first client that has any: all must have the same.
    names = choose_features(features, index.notes["features"].tolist(), str(path))

    def read(name: str) -> Arrays:
        try:
            held = handle()
            group = _h5py().h5g.open(held.root, name.encode())
            if not len(group):
                return {}
            where = f"{path}: client {name!r}"
            found = {new: _feature(where, group, old, held.size) for new, old in names.items()}
            # Names may be of one data set, so that each is small enough and all are not.
            check_size(where, sum(one.bytes for one in found.values()), held.size)
            return {new: _array(where, one, held.size, longest) for new, one in found.items()}
        except DataError:
            raise
        except BROKEN as error:
            raise DataError(f"{path}: client {name!r} can't be read: {describe(error)}") from None

    return make_federation(path, index, read)


def write_hdf5(path: str | Path, clients: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Write (client, arrays by feature) in this layout. Text is kept as UTF-8 of any length.

    The file appears under its name when it is whole. The system's errors come as they are.
    """
    path = Path(path)
    with stage(path) as beside:
        made = beside / "made.h5"
        with made.open("w+b", buffering=0) as raw:
            disk = _Disk(raw)
            with _h5py().File(disk, "w") as file:
                root = file.create_group(ROOT)
                for name, arrays in clients:
                    _write_client(root, name, arrays)
                    if disk.error is not None:
                        break
            if disk.error is not None:
                raise disk.error
        settle(made, path)


def write_partition(path: Path, partition: Partition) -> None:
    """Each client's rows of the arrays, in TFF's layout."""
    with progress(f"writing {path.name}") as tell:

        def clients() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
            arrays, rows, names = partition
            for done, (name, own) in enumerate(zip(names, rows, strict=True), start=1):
                yield name, {feature: array[own] for feature, array in arrays.items()}
                tell(done, len(names))

        write_hdf5(path, clients())


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


def _write_client(root: Any, name: str, arrays: Mapping[str, Any]) -> None:
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
        group.create_dataset(feature, data=array, dtype=_h5py().string_dtype())


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


@functools.cache
def _h5py() -> Any:
    return import_optional("h5py", "HDF5 files", "experiments")


def _open(path: Path) -> Any:
    h5py = _h5py()
    try:
        # Read-only: locks would only stop those who read from places that can't be written.
        return h5py.File(path, "r", locking=False)
    except BROKEN as error:
        raise DataError(
            f"{path} can't be opened, it is cut or no HDF5 file: {describe(error)}"
        ) from None


class _Held(NamedTuple):
    file: Any
    root: Any
    """Its group of clients, opened once for all of them."""
    size: int
    """Its bytes."""


def _held(path: Path, seen: str) -> Callable[[], _Held]:
    """Opens the file once for every process: one that was forked opens it again."""
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
                    files[process] = _Held(file, file[ROOT].id, path.stat().st_size)
        return files[process]

    return held


def _build(path: Path) -> Index:
    """Low-level calls: there may be hundreds of thousands of clients."""
    size = path.stat().st_size
    with _open(path) as file, progress(f"indexing {path.name}") as tell:
        root, names = _clients(path, file)
        ids, counts = [], np.zeros(len(names), np.int64)
        first, features = "", list[str]()
        for i, name in enumerate(names):
            ids.append(name.decode(errors="surrogateescape"))
            where = f"{path}: client {ids[i]!r}"
            try:
                group = _h5py().h5g.open(root, name)
                own = [feature.decode() for feature in _links(where, "feature", group)]
                if own and not features:
                    first, features = ids[i], own
                if own:
                    _check_features(where, own, first, features)
                    counts[i] = _feature(where, group, own[0], size).shape[0]
            except DataError:
                raise
            except BROKEN as error:
                raise DataError(f"{where} can't be read: {describe(error)}") from None
            if i % 1000 == 0:
                tell(i, len(names))
        tell(len(names), len(names))
    notes = {"features": np.array(features, np.str_), "longest": np.array(_longest_text(path))}
    return Index(ids, counts, notes=notes)


def _clients(path: Path, file: Any) -> tuple[Any, list[bytes]]:
    """The group of clients, and their names."""
    root = None
    with contextlib.suppress(*BROKEN):
        if file.id.links.get_info(ROOT.encode()).type == _h5py().h5l.TYPE_HARD:
            root = file[ROOT].id
    if not isinstance(root, _h5py().h5g.GroupID):
        raise DataError(f"{path} has no group /{ROOT}: it is not in the layout of TFF")
    try:
        return root, _links(path, "client", root)
    except DataError:
        raise
    except BROKEN as error:
        raise DataError(
            f"{path}: the names of its clients can't be read: {describe(error)}"
        ) from None


def _links(where: object, what: str, group: Any) -> list[bytes]:
    """The names in a group. Links are refused: they may lead to other files, or in circles."""
    h5l = _h5py().h5l
    found: list[tuple[bytes, int]] = []
    group.links.iterate(lambda name, info: found.append((name, info.type)), info=True)
    for name, kind in found:
        if kind != h5l.TYPE_HARD:
            shown = name.decode(errors="replace")
            links = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}
            link = links.get(kind, "a link")
            raise DataError(f"{where}: {what} {shown!r} is {link}: must be in the file itself")
    return [name for name, _ in found]


def _check_features(where: str, own: list[str], first: str, features: list[str]) -> None:
    """Refuse a client that has other features than the first one."""
    if own == features:
        return
    for feature in features:
        if feature not in own:
            raise DataError(f"{where} has no feature {feature!r}, which client {first!r} has")
    for feature in own:
        if feature not in features:
            raise DataError(f"{where} has feature {feature!r}, which client {first!r} has not")


class _Feature(NamedTuple):
    dataset: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bytes: int
    """Of its array, texts of any length without their content."""


def _feature(where: str, group: Any, name: str, size: int) -> _Feature:
    """A feature: in this file, of numbers or text, and no larger than it can be."""
    dataset = _h5py().h5d.open(group, name.encode())
    shape, dtype = dataset.shape, dataset.dtype
    if not shape:
        raise DataError(f"{where} has {name!r} of shape []: must have examples")
    if dtype.hasobject and _h5py().check_string_dtype(dtype) is None:
        raise DataError(f"{where} has {name!r} of type {dtype}: must be numbers or text")
    claimed = math.prod(shape) * dtype.itemsize
    feature = _Feature(dataset, shape, dtype, claimed)
    if dataset.get_offset() is None:  # it is not in this file in one piece
        made = dataset.get_create_plist()
        layout = made.get_layout()
        if layout == _h5py().h5d.VIRTUAL or made.get_external_count():
            raise DataError(f"{where} has {name!r} in another file: must be in the file itself")
        if claimed and layout == _h5py().h5d.CHUNKED:
            # A chunk is read whole, however little of it is used.
            claimed = max(claimed, math.prod(made.get_chunk()) * dtype.itemsize)
    # Chunks that were never written take no room: an array of them is an array of nothing.
    stored = min(dataset.get_storage_size(), size)
    check_size(f"{where}: {name!r}", max(claimed, shape[0]), stored)
    return feature


def _array(where: str, feature: _Feature, size: int, longest: int) -> np.ndarray:
    """Low-level calls again: a client's few rows are read in a third of the time."""
    dataset, shape, dtype, _ = feature
    array = np.empty(shape, dtype)
    if array.size and dtype.hasobject:
        _read_text(where, dataset, array, size, longest)
    elif array.size:
        dataset.read(_h5py().h5s.ALL, _h5py().h5s.ALL, array)
    # Strings: of any length, or of a fixed one.
    if _h5py().check_string_dtype(dtype) is not None:
        return as_text(array.ravel().tolist(), shape)
    return array


def _read_text(where: str, dataset: Any, array: np.ndarray, size: int, longest: int) -> None:
    """Text of any length into `array`, in blocks: texts that are one in the file are many here."""
    step = max(1, BLOCK // max(1, longest * math.prod(array.shape[1:])))
    if step >= len(array):
        dataset.read(_h5py().h5s.ALL, _h5py().h5s.ALL, array)
        return
    total, space = 0, dataset.get_space()
    for first in range(0, len(array), step):
        block = array[first : first + step]
        space.select_hyperslab((first, *[0] * (block.ndim - 1)), block.shape)
        dataset.read(_h5py().h5s.create_simple(block.shape), space, block)
        total += sum(map(len, block.flat))
        if total > size:
            raise DataError(f"{where} has more text than the file has bytes: it is damaged")


def _longest_text(path: Path) -> int:
    """Bytes of the longest text in the file. Heaps in which HDF5 would never end are refused.

    HDF5 goes through a heap from object to object, and stands still at a free one of size 0.
    """
    data = np.memmap(path, np.uint8, "r")
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the one at every byte
    found = re.finditer(re.escape(HEAP), data.data)
    starts = np.array([match.start() for match in found], np.int64)
    starts = starts[starts < len(data) - HEAP_LEAST]
    sizes = words[starts + 8]
    heaps = (sizes >= HEAP_LEAST) & (sizes <= (len(data) - starts).astype(np.uint64))
    at, end = starts[heaps] + OBJECT, starts[heaps] + sizes[heaps].astype(np.int64)
    longest = 0
    for _ in range(OBJECTS):
        inside = at + OBJECT <= end
        at, end = at[inside], end[inside]
        if not len(at):
            return longest
        sizes, free = words[at + 8], words[at] & 0xFFFF == 0
        bad = (sizes > (end - at).astype(np.uint64)) | free & (sizes < OBJECT)
        if bad.any():
            raise DataError(f"{path} is damaged: its text can't be read at byte {at[bad][0]}")
        steps = sizes.astype(np.int64)
        longest = max(longest, int(steps[~free].max(initial=0)))
        at += np.where(free, steps, OBJECT + (steps + 7) // 8 * 8)
    raise DataError(f"{path} is damaged: its text can't be read at byte {at[0]}")
