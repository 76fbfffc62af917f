"""Atomic writes: a file or a directory has its name when it is complete, or not at all.

It is written beside its place under another name, synced to disk and renamed, so that neither an
exception, nor a kill, nor a crash of the machine leaves half of it.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PART = ".part"
"""What the name of a file or directory ends with until it is complete."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, in the place of one of that name."""
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
    """Give an empty directory to write to, which takes the name `path` when the block ends.

    A directory of that name is replaced. After an exception nothing is left of the new one.
    """
    part = path.with_name(path.name + PART)
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
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
    """Remove a directory, as far as the system lets it, such that no half of it keeps its name."""
    part = path.with_name(path.name + PART)
    with contextlib.suppress(OSError):
        path.rename(part)
        shutil.rmtree(part)


def sync(path: Path) -> None:
    """Have the system write a file or a directory's names to disk."""
    if os.name == "nt" and path.is_dir():  # which Windows can't open
        return
    number = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
