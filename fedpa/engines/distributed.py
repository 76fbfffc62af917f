"""Several processes, on one host or many, as one machine: JAX's distributed runtime.

Every process runs the same command with its own number; process 0 is the coordinator. The sharded
engine then divides clients among the devices of all processes. Aggregates are sent by XLA's
collectives (NCCL on GPUs, Gloo on CPUs).
"""

import socket
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpa.engines.options import Processes
from fedpa.errors import check_integer, refuse


def check_processes(processes: Processes) -> None:
    """Refuse incomplete or contradictory settings."""
    coordinator, number, own = (
        processes.coordinator,
        processes.num_processes,
        processes.process_id,
    )
    if coordinator is None and number is None and own is None:
        return
    if coordinator is None or number is None or own is None:
        names = ("coordinator", "num_processes", "process_id")
        missing = next(name for name in names if getattr(processes, name) is None)
        raise refuse(missing, None, "coordinator, num_processes and process_id are needed together")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise refuse("coordinator", coordinator, "must be host:port, as in 10.0.0.1:9911")
    check_integer("num_processes", number, 1)
    check_integer("process_id", own, 0)
    check_integer("join_timeout", processes.join_timeout, 1)
    if own >= number:
        expected = f"must be below num_processes = {number}: they count from 0"
        raise refuse("process_id", own, expected)


def join(processes: Processes) -> None:
    """Connect to the others, before anything else uses JAX; no-op for a process alone."""
    check_processes(processes)
    if processes.coordinator is None or jax.distributed.is_initialized():
        return
    if processes.process_id != 0:
        _await_coordinator(processes.coordinator, processes.join_timeout)
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.num_processes,
            processes.process_id,
            initialization_timeout=processes.join_timeout,
        )
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        met = f"the {processes.num_processes} processes did not all connect within "
        met += f"{processes.join_timeout} s: {text}"
        raise refuse("coordinator", processes.coordinator, met) from None


def is_first() -> bool:
    """Whether this process is the one that writes files and messages."""
    return jax.process_index() == 0


def from_first(decide: Callable[[], bool]) -> bool:
    """Broadcast the value of process 0 to all processes."""
    if jax.process_count() == 1:
        return decide()
    decided = np.asarray(is_first() and decide())
    return bool(multihost_utils.broadcast_one_to_all(decided))


def _await_coordinator(coordinator: str, timeout: int) -> None:
    """Wait for the coordinator: the runtime itself would end the process, not raise."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, int(port)), timeout=max(left, 0.1)).close()
            return
        except OSError as error:
            if left <= 0.2:
                expected = (
                    f"could not be reached within {timeout} s ({error}): is process 0 running"
                )
                raise refuse("coordinator", coordinator, f"{expected} there?") from None
        time.sleep(0.2)
