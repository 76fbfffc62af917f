"""Files that are there whole or not at all, also after a kill or a crash of the machine."""

import contextlib
import io
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedpa.errors import FedpaError, explain

PART = ".part"
"""What a file is called until it is whole."""


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
