"""Shared code of readers: checks of sizes and damage, index of clients, choice of features."""

import contextlib
import importlib
import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from fedpa.data.cache import Index, progress, stamp
from fedpa.errors import DataError, FedpaError, explain, refuse

if TYPE_CHECKING:
    from fedpa.data.federated import FederatedData

Arrays: TypeAlias = dict[str, np.ndarray]
Features: TypeAlias = Mapping[str, str] | Sequence[str] | None
"""Which features are read: their names, or the name each shall have → its name in the file. None:
all of them."""
Handle = TypeVar("Handle")

MAX_RATIO = 1032
"""Bytes that one stored byte may become: deflate (in npz and HDF5) makes no more of it."""
MAX_BYTES = 2**32
"""Bytes that are read into memory at once, of an array or a table that is stored in fewer."""
VARIABLE = "FEDPA_MAX_BYTES"
"""The environment's variable that replaces both limits by a number of bytes."""


def find_limit(
    stored: int, *, ratio: int = MAX_RATIO, most: int = MAX_BYTES, least: int = 0
) -> int:
    """Limit the bytes that `stored` bytes may expand to. Uncompressed data has no limit.

    Args:
        stored: Bytes of the file, or of the part of it that holds the data.
        ratio: Bytes that one of them may become.
        most: The limit for compressed data of any ratio.
        least: Bytes that are always allowed.
    """
    own = os.environ.get(VARIABLE)
    if own:
        if not own.isdecimal():
            raise refuse(VARIABLE, own, "must be a whole number of bytes")
        return int(own)
    return max(stored, min(max(ratio * stored, least), most))


def check_size(what: str, claimed: int, stored: int, limit: int | None = None) -> None:
    """Refuse data that has more bytes than `stored` bytes may become (see `find_limit`)."""
    limit = find_limit(stored) if limit is None else limit
    if claimed > limit:
        raise DataError(
            f"{what} claims {claimed} bytes, stored in {stored}: at most {limit} are read. It may "
            f"be damaged; if it is right, set {VARIABLE} to the bytes it needs"
        )


@contextlib.contextmanager
def refuse_damaged(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise a DataError, `what` and the error's text on one line, for errors of a file.

    Args:
        what: The file, client and array, and what can't be done with it.
        kinds: The types of errors that a library raises for a damaged file; default: any.
    """
    kinds = kinds or (Exception,)
    try:
        yield
    except FedpaError:
        raise
    except kinds as error:
        raise DataError(f"{what}: {describe(error)}") from None


def read_json(path: Path, **options: Any) -> Any:
    """Read a JSON file. options: of `json.loads`."""
    with (
        refuse_damaged(f"{path} can't be read", OSError),
        refuse_damaged(f"{path} is truncated or not JSON", ValueError, RecursionError),
    ):
        return json.loads(path.read_bytes(), **options)


def describe(error: BaseException) -> str:
    """An error's text on one line that can be printed. A KeyError shows its text in quotes."""
    own: object = error.args[0] if isinstance(error, KeyError) and error.args else error
    own = explain(error) if isinstance(error, OSError) else own
    line = " ".join(str(own).split()) or type(error).__name__
    return "".join(char if char.isprintable() else "�" for char in line)[:300]


def show_names(names: Sequence[object]) -> str:
    """Names of a file for a message: at most twenty, those that can't be printed in quotes."""
    shown = [str(name) if str(name).isprintable() else repr(name) for name in names[:20]]
    return ", ".join([*shown, "..."] if len(names) > 20 else shown)


def import_optional(name: str, what: str, extra: str) -> Any:
    """Import a package that only one of the readers needs; without it, say what installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise FedpaError(f"{what} need {name}: pip install 'fedpa[{extra}]' installs it") from None


def hold_open(path: Path, open_file: Callable[[Path], Handle]) -> Callable[[], Handle]:
    """Return a function that opens the file at its first call, and then gives what it opened.

    A process that was forked opens it again. A file that has changed since is refused.
    """
    seen, lock, handles = stamp(path), threading.Lock(), dict[int, Handle]()

    def get_handle() -> Handle:
        process = os.getpid()
        if process not in handles:
            with lock:
                if process not in handles:
                    if stamp(path) != seen:
                        raise DataError(f"{path} has changed since it was opened")
                    handles[process] = open_file(path)
        return handles[process]

    return get_handle


def index_clients(
    source: Path, ids: Sequence[str], look: Callable[[str], tuple[list[str], int]]
) -> Index:
    """Go through all clients once: how many examples each has. All must have the same features.

    Args:
        ids: Sorted.
        look: id → its features, none for a client without examples, and how many examples it has.
    Returns:
        The index, with the `features` of the first client that has any among its notes.
    """
    counts = np.zeros(len(ids), np.int64)
    first, features = "", list[str]()
    with progress(f"indexing {source.name}") as tell:
        for i, name in enumerate(ids):
            own, counts[i] = look(name)
            if own and not features:
                first, features = name, own
            if own:
                check_features(f"{source}: client {name!r}", own, f"client {first!r}", features)
            if i % 1000 == 0:
                tell(i, len(ids))
        tell(len(ids), len(ids))
    return Index(list(ids), counts, {"features": np.array(features, np.str_)})


def check_features(where: str, own: Collection[str], other: str, features: Collection[str]) -> None:
    """Refuse features that are not those of another client, or another row."""
    for feature in features:
        if feature not in own:
            raise DataError(f"{where} has no feature {feature!r}, which {other} has")
    for feature in own:
        if feature not in features:
            raise DataError(f"{where} has feature {feature!r}, which {other} has not")


def choose_features(features: Features, there: Collection[str], of: str) -> dict[str, str]:
    """The name each feature shall have → its name among those that are there."""
    if features is None:
        return {name: name for name in there}
    if isinstance(features, str):
        raise refuse("features", features, "must be a list of names")
    names = dict(features) if isinstance(features, Mapping) else {name: name for name in features}
    for name in names.values():
        if name not in there:
            raise DataError(f"{of} has no feature {name!r}: there are {show_names(sorted(there))}")
    return names


def make_federation(
    source: object,
    index: Index,
    read: Callable[[str], Arrays],
    rows: Callable[[str], np.ndarray] | None = None,
) -> "FederatedData":
    """Clients of `index`, each read by `read` when it is asked for.

    A client without examples may be read as no arrays at all: it gets empty ones like the others'.
    rows: id → the source's rows that are the client's, where that is a table.
    """
    from fedpa.data.federated import FederatedData  # imports JAX

    if not index.ids:
        raise DataError(f"{source} has no clients")
    counts = dict(zip(index.ids, index.counts.tolist(), strict=True))
    like = next((name for name, n in counts.items() if n), None)

    def num_examples(name: str) -> int:
        if name not in counts:
            raise FedpaError(f"{source} has no client {name!r}")
        n: int = counts[name]
        return n

    def examples(name: str) -> Arrays:
        n = num_examples(name)
        arrays = read(name)
        if not n and not arrays and like is not None:
            return {feature: array[:0] for feature, array in read(like).items()}
        for feature, array in arrays.items():
            if array.ndim == 0 or len(array) != n:
                raise DataError(
                    f"{source}: client {name!r} has {feature} of shape {list(array.shape)}: must "
                    f"have {n} examples"
                )
        return arrays

    def locate(name: str, row: int | None) -> str:
        at = "" if rows is None or row is None else f", row {rows(name)[row]}"
        return f"{source}{at}: client {name!r}"

    return FederatedData(index.ids, num_examples, examples, locate=locate)


def as_objects(values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """An object array of the values."""
    array = np.empty(shape, object)
    array.ravel()[:] = values
    return array


def as_text(array: np.ndarray) -> np.ndarray:
    """An object array of `str`, of bytes in UTF-8 or text. What is not UTF-8 shows as �."""
    values = [
        value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        for value in array.ravel().tolist()
    ]
    return as_objects(values, array.shape)
