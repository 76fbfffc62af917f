"""Files that are there whole or not at all, also after a kill or a crash of the machine."""

import contextlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedpa.errors import FedpaError, explain
from fedpa.training.lock import locked

PART = ".part"
"""What a file is called until it is whole."""
MOVED = ".files"
"""In a directory of staged files: the names of those that are being moved."""


def write_atomically(path: Path, content: bytes) -> None:
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
def stage_files(target: Path) -> Iterator[Path]:
    """Open an empty directory beside `target` for files that belong together.

    `publish` gives them their names as the last step. The directory is gone afterwards; what a kill
    leaves of it, the next call for the same target removes.

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
                stack.enter_context(locked(staged))
            yield staged
    finally:
        _discard(staged)


def publish(staged: Path, names: Sequence[str]) -> None:
    """Move files from `stage_files`' directory to the one it is in, in this order.

    If that is cut short, `remove_leftovers` removes those that were moved: all are there, or none.
    """
    for name in names:
        _sync(staged / name)
    write_atomically(staged / MOVED, "\n".join(names).encode())
    for name in names:
        os.replace(staged / name, staged.parent / name)
    (staged / MOVED).unlink()
    _sync(staged.parent)


def remove_leftovers(target: Path) -> None:
    """Remove what a process that was killed left of the files that belong to `target`.

    Directories that a living process holds stay.
    """
    if not target.parent.is_dir():
        return
    for path in sorted(target.parent.iterdir()):
        if path.name.startswith(_prefix(target)) and path.name.endswith(PART) and path.is_dir():
            with contextlib.suppress(FedpaError), locked(path):
                _discard(path)


def _prefix(target: Path) -> str:
    return f".{target.name[:60]}."


def _discard(staged: Path) -> None:
    """Remove the directory, and those of its files that were moved when not all were."""
    with contextlib.suppress(FileNotFoundError):
        listed = (staged / MOVED).stat().st_mtime
        for name in (staged / MOVED).read_text().splitlines():
            moved = staged.parent / name
            # What is younger than the list has been written since, by others.
            if not (staged / name).exists() and moved.exists() and moved.stat().st_mtime <= listed:
                moved.unlink()
    shutil.rmtree(staged, ignore_errors=True)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # can't be opened there
    place = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """As np.savez writes it; names may be any."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, array in arrays.items():
            with file.open(zipfile.ZipInfo(name + ".npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asarray(array), allow_pickle=False)
    write_atomically(path, content.getvalue())


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name; a file of anything else is refused."""
    try:
        # Opened here: np.load leaves a file it can't read open.
        with path.open("rb") as file, zipfile.ZipFile(file) as stored:
            return {name.removesuffix(".npy"): _array(stored, name) for name in stored.namelist()}
    except Exception as error:  # zipfile and NumPy raise a dozen kinds for damaged bytes
        reason = explain(error) if isinstance(error, OSError) else " ".join(str(error).split())
        raise FedpaError(
            f"{path} is cut or no .npz file of parameters: {reason or type(error).__name__}"
        ) from None


def _array(stored: zipfile.ZipFile, name: str) -> np.ndarray:
    with stored.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
