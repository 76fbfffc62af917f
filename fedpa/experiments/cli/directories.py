"""Directories that a command makes, and does not leave behind empty."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def left_as_found(directory: Path) -> Iterator[None]:
    """Whoever makes this directory inside: it is gone afterwards if nothing came to be in it."""
    fresh = [path for path in [directory, *directory.absolute().parents] if not path.exists()]
    try:
        yield
    finally:
        for path in fresh:  # the innermost first; what holds something stays
            with contextlib.suppress(OSError):
                path.rmdir()
