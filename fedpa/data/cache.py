"""The cache of what is made once of a file and reused, as its index; and such work's progress."""

import contextlib
import contextvars
import errno
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from fedpa import places
from fedpa.errors import DataError, FedpaError, explain

Tell: TypeAlias = Callable[[int, int | None], None]
"""(done so far, of how many if that is known) → None."""

Listener: TypeAlias = Callable[[str], contextlib.AbstractContextManager[Tell]]
"""What is being done → where to tell how far it is."""


@contextlib.contextmanager
def _ignore(what: str) -> Iterator[Tell]:
    del what
    yield lambda done, total: None


_listener: contextvars.ContextVar[Listener] = contextvars.ContextVar("listener", default=_ignore)


def progress(what: str) -> contextlib.AbstractContextManager[Tell]:
    """`with progress("indexing a.h5") as tell: … tell(done, total)`."""
    return _listener.get()(what)


@contextlib.contextmanager
def show_progress(listener: Listener) -> Iterator[None]:
    """Show the progress of what is done inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def stamp(path: Path, part: str = "") -> str:
    """A short text that changes when the file does: by its place, size and time.

    Of a directory: by the names, sizes and times of its files.
    """
    try:
        resolved = path.resolve(strict=True)
        if resolved.is_dir():
            with os.scandir(resolved) as entries:
                files = sorted((e.name, *_size_and_time(e.stat())) for e in entries if e.is_file())
            facts: object = files
        else:
            facts = _size_and_time(resolved.stat())
    except FileNotFoundError:
        raise DataError(f"{path} is not there") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {explain(error)}") from None
    text = repr((str(resolved), facts, part))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


@contextlib.contextmanager
def stage(target: Path) -> Iterator[Path]:
    """An empty directory beside `target`, for what `settle` then gives the target's name.

    It is removed afterwards, whatever happens: a half-made file never has the target's name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{target.name[:60]}.", dir=target.parent))
    try:
        yield beside
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def settle(made: Path, target: Path) -> None:
    """Give what was made its name. If another process was quicker its directory stays."""
    try:
        made.replace(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not target.is_dir():
            raise


def fill_directory(
    target: Path, make: Callable[[Path], None], is_complete: Callable[[Path], bool]
) -> Path:
    """The directory `target` of the cache; unless it is complete, `make` fills it beside its place.

    is_complete: whether all is there still: programs that tidy caches remove single files.
    """
    if is_complete(target):
        return target
    try:
        with stage(target) as beside:
            made = beside / "content"
            made.mkdir()
            make(made)
            settle(made, target)
            if not is_complete(target):
                # What was there is damaged. Looked at only now: before, it might have been what
                # another process had put there in the meantime.
                shutil.rmtree(target)
                settle(made, target)
    except OSError as error:
        raise write_error(target, error) from None
    return target


def write_error(target: Path, error: OSError) -> FedpaError:
    """The error for something that can't be kept: no room, no right to write."""
    room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room" if room else "make it writable"
    return FedpaError(
        f"{target.parent} can't be written ({explain(error)}): {advice}, or set "
        "XDG_CACHE_HOME to another directory"
    )


def _size_and_time(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


VERSION = "2"
"""Of the kept form: another one re-creates indices."""


class Index(NamedTuple):
    ids: list[str]
    """Sorted."""
    counts: np.ndarray
    """int64, the examples of each."""
    aligned: Mapping[str, np.ndarray] = {}
    """What else the reader wants to know of each: first axis as `ids`."""
    notes: Mapping[str, np.ndarray] = {}
    """What it wants to know of the whole."""


def load_index(path: Path, part: str, build: Callable[[], Index]) -> Index:
    """The index of a file or directory, from the cache if it has not changed since.

    part: what the index is of, for example the split, if the file holds several.
    build: finds it, in any order. A client that is there twice is refused.
    """
    target = places.cache() / "indices" / f"{stamp(path, f'{part}|{VERSION}')}.npz"
    known = _read_index(target)
    if known is not None:
        return known
    index = _sort(path, build())
    with contextlib.suppress(OSError):  # without it the next call takes longer, nothing else
        _write_index(target, index)
    return index


def _sort(path: Path, index: Index) -> Index:
    order = sorted(range(len(index.ids)), key=index.ids.__getitem__)
    ids = [index.ids[i] for i in order]
    refuse_duplicates(path, ids)
    rows = np.array(order, np.int64)
    moved = {name: array[rows] for name, array in index.aligned.items()}
    return Index(ids, np.asarray(index.counts, np.int64)[rows], moved, index.notes)


def refuse_duplicates(path: Path, ids: Sequence[str]) -> None:
    """Sorted ids, each once."""
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise DataError(f"{path}: client {one!r} is there twice")


def _write_index(target: Path, index: Index) -> None:
    arrays = {"ids": np.frombuffer(json.dumps(index.ids).encode(), np.uint8)}
    arrays |= {"counts": index.counts}
    arrays |= {f"aligned.{name}": array for name, array in index.aligned.items()}
    arrays |= {f"notes.{name}": array for name, array in index.notes.items()}
    with stage(target) as beside:
        made = beside / "index.npz"
        np.savez(made, allow_pickle=False, **arrays)
        settle(made, target)


def _read_index(target: Path) -> Index | None:
    """None if there is none, or one that is damaged."""
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            ids = json.loads(arrays["ids"].tobytes())
            found = {name: arrays[name] for name in arrays.files if "." in name}
            index = Index(
                ids,
                arrays["counts"],
                _below("aligned.", found),
                _below("notes.", found),
            )
    except Exception:  # of a file that is damaged, NumPy and zipfile raise every kind
        return None
    sizes = {len(array) for array in (index.counts, *index.aligned.values())}
    return index if sizes == {len(index.ids)} else None


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
