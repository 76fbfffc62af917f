"""What is made once and kept in the cache: named by what it was made of, put in place whole."""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedpa.errors import DataError, FedpaError, explain


def stamp(path: Path, part: str = "") -> str:
    """A short text that changes when the file does: by its place, size and time.

    Of a directory: by the names, sizes and times of the files that lie in it.
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
def whole(target: Path) -> Iterator[Path]:
    """An empty directory beside `target`; who has put something there calls `settle`.

    It is gone afterwards, whatever happens: a half-made file never bears the target's name.
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


def unwritable(target: Path, error: OSError) -> FedpaError:
    """The error for something that can't be kept: no room, no right to write."""
    room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = "make room" if room else "make it writable"
    return FedpaError(
        f"{target.parent} can't be written ({explain(error)}): {advice}, or set "
        "XDG_CACHE_HOME to another directory"
    )


def _size_and_time(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns
