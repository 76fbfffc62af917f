"""JAX's persistent compilation cache: what was compiled once is read back by later runs."""

from pathlib import Path
from typing import Any

import jax

from fedpa.places import cache

WORTH_KEEPING = 0.3
"""Seconds a compilation must take to be kept."""


def directory() -> Path:
    """The user's cache directory for compiled programs."""
    return cache() / "compiled"


def switch_on(worth_keeping: float = WORTH_KEEPING) -> None:
    """Use the cache, unless the user has set one up or switched it off (JAX's own settings)."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None and config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(directory()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", worth_keeping)
