"""Atomic writes: a file or a directory appears under its name complete, or not at all.

It is written under a temporary name in the same directory, synced to disk and renamed, so that no
exception, kill or crash of the machine leaves half of it.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PART = ".part"
"""Suffix of a file or directory until it is complete."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file; an existing one is replaced."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


@contextlib.contextmanager
def write_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory, which is renamed to `path` when the block ends.

    A directory of that name is replaced. After an exception nothing is left of the new one.
    """
    part = path.with_name(path.name + PART)
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
    part.mkdir(parents=True)
    try:
        yield part
        for file in part.iterdir():
            sync(file)
        sync(part)
        if path.exists():
            shutil.rmtree(path)
        part.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def remove_directory(path: Path) -> None:
    """Remove a directory; it is renamed first, so that no half of it keeps its name."""
    part = path.with_name(path.name + PART)
    with contextlib.suppress(OSError):
        path.rename(part)
        shutil.rmtree(part)


def sync(path: Path) -> None:
    """Sync a file, or the names in a directory, to disk."""
    if os.name == "nt" and path.is_dir():  # Windows can't open directories
        return
    number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
