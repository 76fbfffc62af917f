"""Files that are written together: all of them appear or none, also after a kill."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedpa.atomic_write import PART, sync, write_atomically
from fedpa.errors import FedpaError
from fedpa.training.run_directory import lock_directory

MOVED = ".files"
"""File in the staging directory with the names of files that are being moved."""


@contextlib.contextmanager
def stage_files(target: Path) -> Iterator[Path]:
    """Open an empty staging directory next to `target`.

    `publish` moves the files to their names as the last step. The directory is removed afterwards;
    after a kill, the next call for the same target removes it.

    Args:
        target: The main file, or any path in the directory that the files are for.
    Returns:
        The directory, `.<target's name>.<random>.part`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    staged = Path(tempfile.mkdtemp(prefix=_prefix(target), suffix=PART, dir=target.parent))
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FedpaError):  # a file system without locks
                stack.enter_context(lock_directory(staged))
            yield staged
    finally:
        _discard(staged)


def write_together(target: Path, files: Mapping[str, bytes]) -> None:
    """Write files next to `target`, by name, in this order: all of them or none."""
    with stage_files(target) as staged:
        for name, content in files.items():
            (staged / name).write_bytes(content)
        publish(staged, list(files))


def publish(staged: Path, names: Sequence[str]) -> None:
    """Move files from `stage_files`' directory to the one it is in, in this order.

    If that is interrupted, `remove_leftovers` removes those that were moved.
    """
    for name in names:
        sync(staged / name)
    write_atomically(staged / MOVED, "\n".join(names).encode())
    for name in names:
        os.replace(staged / name, staged.parent / name)
    (staged / MOVED).unlink()
    sync(staged.parent)


def remove_leftovers(target: Path) -> None:
    """Remove files of `target` that a killed process left.

    Directories that a living process holds stay.
    """
    if not target.parent.is_dir():
        return
    for path in sorted(target.parent.iterdir()):
        if path.name.startswith(_prefix(target)) and path.name.endswith(PART) and path.is_dir():
            with contextlib.suppress(FedpaError), lock_directory(path):
                _discard(path)


def _prefix(target: Path) -> str:
    return f".{target.name[:60]}."


def _discard(staged: Path) -> None:
    """Remove the directory, and moved files if not all were moved."""
    with contextlib.suppress(FileNotFoundError):
        listed = (staged / MOVED).stat().st_mtime
        for name in (staged / MOVED).read_text().splitlines():
            moved = staged.parent / name
            # A file newer than the list was written since, by another process.
            if not (staged / name).exists() and moved.exists() and moved.stat().st_mtime <= listed:
                moved.unlink()
    shutil.rmtree(staged, ignore_errors=True)
