"""The cache of indices and unpacked files, and the progress of making them."""

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
"""(description) → a callback for progress."""


_listener: contextvars.ContextVar[Listener] = contextvars.ContextVar(
    "listener", default=lambda what: contextlib.nullcontext(lambda done, total: None)
)


def progress(what: str) -> contextlib.AbstractContextManager[Tell]:
    """`with progress("indexing a.h5") as tell: … tell(done, total)`."""
    return _listener.get()(what)


@contextlib.contextmanager
def show_progress(listener: Listener) -> Iterator[None]:
    """Show the progress of the work inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def stamp(path: Path, part: str = "") -> str:
    """Make a short key that changes when the file does: from its path, size and time.

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
    """Open an empty directory next to `target`; `settle` then moves its content to `target`.

    It is removed afterwards in any case: an incomplete file never has the target's name.
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


LISTING = ".files.json"
"""In every directory of the cache: its files and their sizes."""


def fill_directory(target: Path, make: Callable[[Path], None]) -> Path:
    """Have `make` fill the directory `target` of the cache, unless it is there and complete.

    It is filled under a temporary name. Programs that clean caches may remove single files.
    """
    if _is_complete(target):
        return target
    try:
        with stage(target) as beside:
            made = beside / "content"
            made.mkdir()
            make(made)
            (made / LISTING).write_text(json.dumps(_list_sizes(made)))
            settle(made, target)
            if not _is_complete(target):
                # What was there is damaged. Looked at only now: before, it might have been what
                # another process had put there in the meantime.
                shutil.rmtree(target)
                settle(made, target)
    except OSError as error:
        room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room" if room else "make it writable"
        raise FedpaError(
            f"{target.parent} can't be written ({explain(error)}): {advice}, or set "
            "XDG_CACHE_HOME to another directory"
        ) from None
    return target


def _is_complete(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / LISTING).read_text()) == _list_sizes(directory))
    except (OSError, ValueError):
        return False


def _list_sizes(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LISTING)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _size_and_time(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


VERSION = "3"
"""Of the stored form: another one re-creates indices."""


class Index(NamedTuple):
    ids: list[str]
    """Sorted, each once."""
    counts: np.ndarray
    """int64, the examples of each."""
    notes: Mapping[str, np.ndarray] = {}
    """Further facts about the file."""


def load_index(path: Path, part: str, build: Callable[[], Index]) -> Index:
    """Load the index of a file or directory from the cache, or build it if the file has changed.

    Args:
        part: What the index is of, for example the split, if the file holds several.
        build: Goes through the file. An id that it gives twice is refused.
    """
    target = places.cache() / "indices" / f"{stamp(path, f'{part}|{VERSION}')}.npz"
    known = _read_index(target)
    if known is not None:
        return known
    index = build()
    refuse_duplicates(path, index.ids)
    ids = np.frombuffer(json.dumps(index.ids).encode(), np.uint8)
    # Without it the next call takes longer, nothing else.
    with contextlib.suppress(OSError), stage(target) as beside:
        made = beside / "index.npz"
        np.savez(made, allow_pickle=False, ids=ids, counts=index.counts, **index.notes)
        settle(made, target)
    return index


def refuse_duplicates(path: Path, ids: Sequence[str]) -> None:
    """Refuse sorted ids of which one is there twice."""
    for one, other in itertools.pairwise(ids):
        if one == other:
            raise DataError(f"{path}: client {one!r} is there twice")


def _read_index(target: Path) -> Index | None:
    """Read an index; None if there is none, or one that is damaged."""
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
        ids = json.loads(arrays.pop("ids").tobytes())
        index = Index(ids, arrays.pop("counts"), arrays)
    except Exception:  # of a file that is damaged, NumPy and zipfile raise every kind
        return None
    return index if len(index.counts) == len(ids) else None
