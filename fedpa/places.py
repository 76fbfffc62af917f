"""The user's own directories: where data sets are kept, and what can be made again."""

import os
from pathlib import Path


def cache() -> Path:
    """What can be made again: compiled programs, unpacked archives, indices."""
    return _base("XDG_CACHE_HOME", ".cache")


def user_data() -> Path:
    """Where `fedpa data get` puts data sets unless told otherwise."""
    return _base("XDG_DATA_HOME", ".local/share")


def _base(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "fedpa"
