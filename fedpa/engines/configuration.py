"""`fedpa.configure`: JAX settings of the whole process that make runs faster.

The library changes none by itself. The `fedpa` command calls this; code of yours may.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax

from fedpa.places import cache

WORTH_KEEPING = 0.3
"""Seconds a compilation must take to be kept."""
LARGEST_CACHE = 2**31
"""Bytes of compiled programs that are kept, the latest used first, where filelock is installed."""


def configure(*, cached: bool = True, worth_keeping: float = WORTH_KEEPING) -> None:
    """Set JAX up for federated rounds on this machine.

    - CPU programs run in the thread that calls them. JAX's own threads are few, and programs handed
      to them from several threads wait for each other. Takes effect before JAX starts its devices.
    - What was compiled is kept in the user's cache directory and read back by later processes.

    Settings that you made (environment variables, `jax.config`) are left as they are.

    Args:
        cached: Whether to keep compiled programs.
        worth_keeping: Seconds a compilation must take to be kept.
    Example:
        >>> import fedpa
        >>> fedpa.configure(cached=False)
    """
    config: Any = jax.config
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if not cached or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", worth_keeping)
    if importlib.util.find_spec("filelock") is not None:
        jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)


def cache_directory() -> Path:
    """The user's cache directory for compiled programs."""
    return cache() / "compiled"


def count_cores() -> int:
    """Count the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
