"""The user's directories: data sets, and the cache."""

import os
from pathlib import Path


def cache() -> Path:
    """Return the cache directory: compiled programs, unpacked archives, indices."""
    return _base("XDG_CACHE_HOME", ".cache")


def user_data() -> Path:
    """Return the default directory of `fedpa data get`."""
    return _base("XDG_DATA_HOME", ".local/share")


def _base(variable: str, usual: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / usual) / "fedpa"
