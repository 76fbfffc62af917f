"""TensorFlow Federated's HDF5: `/examples/<client>/<feature>`, first axis the examples."""

import contextlib
import functools
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedpa.data.cache import Index, load_index, progress, settle, stage
from fedpa.data.federated import FederatedData
from fedpa.data.partition import Partition
from fedpa.data.readers.reader import (
    Arrays,
    Features,
    as_text,
    check_size,
    choose_features,
    hold_open,
    import_optional,
    index_clients,
    make_federation,
    refuse_damaged,
)
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
    """Open a file of TensorFlow Federated's layout. The first time, it is indexed in the cache.

    All clients must have the same features. Strings come as object arrays of `str`. The file is
    opened when the first client is read and stays open; any thread may read. Links, data sets in
    other files and ones that claim more than the file can hold are refused.

    Args:
        path: The file, with `/examples/<client>/<feature>`.
        features: Which are read: names, or {the name it shall have: its name in the file}; default:
            all.
    Returns:
        The federation; a client is read when it is asked for.
    Raises:
        DataError: The file is damaged or of another layout.
    Example:
        >>> write_hdf5("clients.h5", [("a", {"x": np.zeros((3, 2)), "y": np.ones(3)})])
        >>> open_hdf5("clients.h5", {"label": "y"}).examples("a")
        {'label': array([1., 1., 1.])}
    """
    path = Path(path)
    get_clients = hold_open(path, _open_clients)
    index = load_index(path, "hdf5", lambda: _build(path))
    longest = int(index.notes["longest"])
    names = choose_features(features, index.notes["features"].tolist(), str(path))

    def read(name: str) -> Arrays:
        where = f"{path}: client {name!r}"
        with refuse_damaged(f"{where} can't be read", *BROKEN):
            clients = get_clients()
            group = _h5py().h5g.open(clients.root, name.encode())
            if not len(group):
                return {}
            own = {new: _feature(where, group, old, clients.size) for new, old in names.items()}
            # Names may be of one data set, so that each is small enough and all are not.
            check_size(where, sum(one.bytes for one in own.values()), clients.size)
            return {new: _array(where, one, clients.size, longest) for new, one in own.items()}

    return make_federation(path, index, read)


def write_hdf5(path: str | Path, clients: Iterable[tuple[str, Mapping[str, ArrayLike]]]) -> None:
    """Write clients in TensorFlow Federated's layout. Text is kept as UTF-8 of any length.

    The file is made in memory, for HDF5 may crash if the disk is full, and appears under its name
    when it is whole.

    Args:
        path: The file.
        clients: (id, arrays by feature) of every client, each id once.
    Raises:
        FedpaError: A name or an array can't be written.
        OSError: The system can't write the file.
    Example:
        >>> write_hdf5("clients.h5", [("a", {"x": np.zeros((3, 2))})])
        >>> open_hdf5("clients.h5").num_examples("a")
        3
    """
    path, content = Path(path), io.BytesIO()
    with _h5py().File(content, "w") as file:
        root = file.create_group(ROOT)
        for name, arrays in clients:
            _write_client(root, name, arrays)
    with stage(path) as beside:
        (beside / "made.h5").write_bytes(content.getbuffer())
        settle(beside / "made.h5", path)


def write_partition(path: Path, partition: Partition) -> None:
    """Each client's rows of the arrays, in TFF's layout."""
    with progress(f"writing {path.name}") as tell:

        def clients() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
            arrays, rows, names = partition
            for done, (name, own) in enumerate(zip(names, rows, strict=True), start=1):
                yield name, {feature: array[own] for feature, array in arrays.items()}
                tell(done, len(names))

        write_hdf5(path, clients())


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


class _Clients(NamedTuple):
    file: Any
    root: Any
    """Its group of clients."""
    size: int
    """Its bytes."""


def _open_clients(path: Path) -> _Clients:
    h5py = _h5py()
    with refuse_damaged(f"{path} can't be opened, it is truncated or not an HDF5 file", *BROKEN):
        # Read-only: locks would only stop those who read from places that can't be written.
        file = h5py.File(path, "r", locking=False)
    root = None
    with contextlib.suppress(*BROKEN):
        if file.id.links.get_info(ROOT.encode()).type == h5py.h5l.TYPE_HARD:
            root = file[ROOT].id
    if not isinstance(root, h5py.h5g.GroupID):
        file.close()
        raise DataError(f"{path} has no group /{ROOT}: it is not in the layout of TFF")
    return _Clients(file, root, path.stat().st_size)


def _build(path: Path) -> Index:
    """Low-level calls: there may be hundreds of thousands of clients."""
    file, root, size = _open_clients(path)

    def look(name: str) -> tuple[list[str], int]:
        where = f"{path}: client {name!r}"
        with refuse_damaged(f"{where} can't be read", *BROKEN):
            group = _h5py().h5g.open(root, name.encode(errors="surrogateescape"))
            own = [feature.decode() for feature in _names_in(where, "feature", group)]
            return own, _feature(where, group, own[0], size).shape[0] if own else 0

    with file:
        with refuse_damaged(f"{path}: the names of its clients can't be read", *BROKEN):
            names = _names_in(path, "client", root)
        ids = sorted(name.decode(errors="surrogateescape") for name in names)
        index = index_clients(path, ids, look)
    return index._replace(notes={**index.notes, "longest": np.array(_longest_text(path))})


def _names_in(where: object, what: str, group: Any) -> list[bytes]:
    """The names in a group. Links are refused: they may lead to other files, or in circles."""
    links: list[tuple[bytes, int]] = []
    group.links.iterate(lambda name, info: links.append((name, info.type)), info=True)
    for name, kind in links:
        if kind != _h5py().h5l.TYPE_HARD:
            shown = name.decode(errors="replace")
            raise DataError(f"{where}: {what} {shown!r} is a link: must be in the file itself")
    return [name for name, _ in links]


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
    return array if _h5py().check_string_dtype(dtype) is None else as_text(array)


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
    heads = re.finditer(re.escape(HEAP), data.data)
    starts = np.array([match.start() for match in heads], np.int64)
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
