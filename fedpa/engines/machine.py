"""Devices, cores and memory of the machine; `fedpa.configure` for the process."""

import contextlib
import ctypes
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fedpa.engines.options import EngineOptions
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.places import cache

SHARE = 0.8
"""Share of the free memory that programs may use."""
WORTH_KEEPING = 0.3
"""Seconds a compilation must take to be kept."""
LARGEST_CACHE = 2**31
"""Bytes of compiled programs that are kept, the latest used first, where filelock is installed."""
KEPT = 2**30
"""Bytes of freed memory that the process keeps for later programs, with glibc."""


def choose_devices(options: EngineOptions) -> list[jax.Device]:
    """The devices to use. Refuses options that this machine can't serve."""
    for name in ("devices", "clients_in_flight", "workers"):
        value = getattr(options, name)
        if value is not None:
            check_integer(name, value, 1)
    if options.matmul_precision not in ("default", "high", "highest"):
        raise refuse(
            "matmul_precision", options.matmul_precision, "must be default, high or highest"
        )
    try:
        devices = jax.devices(options.device)
    except RuntimeError:
        kinds = sorted({device.platform for device in jax.devices()})
        raise refuse(
            "device", options.device, f"not available; available: {', '.join(kinds)}"
        ) from None
    if options.devices is not None and options.devices > len(devices):
        hint = (
            f" (XLA_FLAGS=--xla_force_host_platform_device_count={options.devices} divides a CPU)"
        )
        hint = hint if devices[0].platform == "cpu" else ""
        raise refuse("devices", options.devices, f"must be at most {len(devices)}{hint}")
    return devices[: options.devices]


@contextlib.contextmanager
def use_device(device: jax.Device, options: EngineOptions) -> Iterator[None]:
    """Run the block on the device, with the precision of the options."""
    with contextlib.ExitStack() as stack:
        if options.device is not None:
            stack.enter_context(jax.default_device(device))
        if options.matmul_precision != "default":
            stack.enter_context(jax.default_matmul_precision(options.matmul_precision))
        yield


class DoesNotFit(FedpaError):
    """A block of clients needs more memory than is available."""


def count_free_bytes(device: jax.Device) -> int | None:
    """Count the bytes that are free for programs on a device; None if unknown."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    amounts = [amount for amount in (_free_in_machine(), _free_in_group()) if amount is not None]
    return min(amounts, default=None)


def check_fits(needed: int, lanes: int, workers: int, device: jax.Device) -> None:
    """Refuse programs that need more memory than is free: `needed` bytes per worker."""
    free = count_free_bytes(device)
    if free is None or needed * workers <= SHARE * free:
        return
    fitting = int(SHARE * free / (needed / lanes))
    size = f"{_gib(needed * workers)} for {lanes * workers} clients in flight, {_gib(free)} free"
    if fitting < 1:
        raise DoesNotFit(
            f"a round does not fit in memory: {size}; one client alone needs "
            f"{_gib(needed // lanes)}: fewer samples, a smaller batch or a smaller model would fit"
        )
    fitting_lanes = max(min(fitting // workers, lanes), 1)
    fitting_workers = max(min(fitting // fitting_lanes, workers), 1)
    raise DoesNotFit(
        f"a round does not fit in memory: {size}; clients_in_flight = {fitting_lanes} with "
        f"workers = {fitting_workers} would fit"
    )


KEPT_TIMES = 3
"""Memory of an aggregation of all results: they, and what is made of them to compare them."""


def check_sum_fits(kept: int, clients: int, device: jax.Device) -> None:
    """Refuse an aggregation that keeps all results of a round, `kept` bytes, if they don't fit."""
    free = count_free_bytes(device)
    if free is None or KEPT_TIMES * kept <= SHARE * free:
        return
    raise FedpaError(
        f"aggregation: keeps the results of {clients} clients and needs {_gib(KEPT_TIMES * kept)}, "
        f"{_gib(free)} free; {int(SHARE * free * clients / (KEPT_TIMES * kept))} clients per round "
        "would fit, and clipped_mean keeps none"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"


def _free_in_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def _free_in_group() -> int | None:
    """Count the bytes left in the control group (a container, a batch job)."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def configure(*, cached: bool = True, worth_keeping: float = WORTH_KEEPING) -> None:
    """Configure JAX for federated rounds on this machine.

    - CPU programs run in the thread that calls them. JAX's own threads are few, and programs handed
      to them from several threads wait for each other. Takes effect before JAX starts its devices.
    - What was compiled is kept in the user's cache directory and read back by later processes.
    - Memory that a program frees, up to 1 GiB, is kept for the next one. Otherwise glibc's malloc
      returns blocks above 32 MB to the system, which clears them, page by page, for every client.

    Your settings (environment variables, `jax.config`) are not changed.

    Args:
        cached: Whether to keep compiled programs; default: yes.
        worth_keeping: Seconds a compilation must take to be kept; default: 0.3.
    Example:
        >>> fedpa.configure(cached=False)
    """
    config: Any = jax.config
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    _keep_freed_memory()
    if not cached or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    # A limit needs further files in the directory; JAX warns if some programs lack them.
    is_limited = importlib.util.find_spec("filelock") is not None
    directory = cache() / "compiled" / ("limited" if is_limited else "unlimited")
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", worth_keeping)
    if is_limited:
        jax.config.update("jax_compilation_cache_max_size", LARGEST_CACHE)


def _keep_freed_memory() -> None:
    """Set malloc's thresholds, from which blocks come from the system and go back to it."""
    own = os.environ.get("GLIBC_TUNABLES", "") + " ".join(os.environ).lower()
    if platform.libc_ver()[0] != "glibc" or "mmap_threshold" in own or "trim_threshold" in own:
        return
    trim_threshold, mmap_threshold = -1, -3  # as malloc.h names them
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, KEPT)
    libc.mallopt(mmap_threshold, KEPT)


def count_cores() -> int:
    """Count the CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
