"""What there is of memory, and whether a program fits into it."""

from pathlib import Path

import jax

from fedpa.errors import FedpaError

SHARE = 0.8
"""Of the memory that is free, how much programs may take."""


class DoesNotFit(FedpaError):
    """A block of clients needs more memory than there is."""


def available(device: jax.Device) -> int | None:
    """Bytes free for programs on a device; None where nobody says."""
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    amounts = [amount for amount in (_free_in_machine(), _free_in_group()) if amount is not None]
    return min(amounts, default=None)


def check_fits(needed: int, lanes: int, workers: int, device: jax.Device) -> None:
    """Refuse programs that would need more than there is: `needed` bytes for each worker."""
    free = available(device)
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
    """What the control group (a container, a batch job) leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
