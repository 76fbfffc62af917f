"""The machine a run was made on, and what its BLAS reaches."""

import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedpa.engines.machine import count_cores


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": count_cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


class Others:
    """What processes that are not ours took of the cores between two moments (Linux only)."""

    def __init__(self) -> None:
        self.started, self.busy, self.own = time.perf_counter(), _busy(), _own()

    def share(self) -> float | None:
        """0 on an idle machine, towards 1 the more the others took."""
        busy = _busy()
        if busy is None or self.busy is None:
            return None
        available = count_cores() * (time.perf_counter() - self.started)
        return max(0.0, (busy - self.busy - (_own() - self.own)) / available)


def _busy() -> float | None:
    """Seconds in which any core of the machine worked."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _, _, irq, soft, *_ = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    """Seconds of this process and of those that it has started and seen end."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def matmul_peak(size: int = 1536, repeats: int = 5) -> float:
    """FLOP/s of the best of a few float32 products, all cores."""
    a = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    a @ a
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
