"""How engines use the machine, and how processes join. Nothing here imports JAX: help shows it."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine uses the machine; what is not set, the engine chooses.

    None of it changes results by more than rounding.

    Args:
        device: Kind of device to run on: cpu, gpu or tpu (default: JAX's).
        devices: Number of devices for the sharded engine, at least 1 (default: all).
        clients_in_flight: Clients per program on each device, at least 1 (default: the engine
            chooses).
        workers: Programs at the same time, one thread each, at least 1 (default: the engine
            chooses).
        matmul_precision: Precision of matrix products on accelerators (default: "default").
    Example:
        >>> engine = fedpa.engines.local(fedpa.engines.EngineOptions(device="cpu", workers=1))
    """

    device: str | None = None
    devices: int | None = None
    clients_in_flight: int | None = None
    workers: int | None = None
    matmul_precision: Literal["default", "high", "highest"] = "default"


@dataclasses.dataclass(frozen=True)
class Processes:
    """How this process joins others; a run in one process needs none of it."""

    coordinator: str | None = None
    """host:port of process 0. Clients are spread over all processes (default: one process)."""
    num_processes: int | None = None
    """Number of processes, at least 1."""
    process_id: int | None = None
    """Number of this process, from 0."""
    join_timeout: int = 60
    """Seconds to wait for the other processes."""
