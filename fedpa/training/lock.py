"""One process at a time writes to a run's directory.

The lock is the operating system's own, on an open file: however its owner ends, the lock ends with
it, and there is nothing to clean up.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fedpa.errors import FedpaError, explain

LOCK = ".lock"
PATIENCE = 10.0
"""Seconds until a process that was killed with its command has let go."""


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the directory; refused while another process does."""
    try:
        file = (out / LOCK).open("a+")
    except OSError as error:
        raise FedpaError(f"out = {str(out)!r}: can't be written: {explain(error)}") from None
    with file:
        if not _taken(file):
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise FedpaError(
                f"{str(out)!r} is being written by {owner}: wait until it ends, or end it"
            )
        with contextlib.suppress(OSError):  # who it is helps others; a full disk may lack room
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        yield


def wait_for(out: Path) -> None:
    """Until nobody holds the directory any more; refused if that takes long."""
    end = time.monotonic() + PATIENCE
    while (out / LOCK).exists() and os.access(out / LOCK, os.W_OK):
        try:
            with locked(out):
                return
        except FedpaError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if os.name == "nt":
    import msvcrt

    def _taken(file: IO[str]) -> bool:
        try:
            # A byte far behind the text, which others must be able to read.
            os.lseek(file.fileno(), 2**20, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            return False
        return True

else:
    import fcntl

    def _taken(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise FedpaError(
                f"{file.name}: can't be locked ({explain(error)}): the file system does not know "
                "locks; choose a directory on another"
            ) from None
        return True
