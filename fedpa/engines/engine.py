"""Where clients run. An engine moves, weighs and averages; it does not know the algorithm.

(client update, aggregation, message, cohort) → the aggregate, and each client's info and new state.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientState, ClientUpdate, Message
from fedpa.engines.resident import Packed
from fedpa.errors import check_integer, refuse
from fedpa.server.aggregation import Aggregate, Aggregation
from fedpa.types import Keys, Params


class Cohort(NamedTuple):
    """The clients of one round, S in Algorithm 1."""

    ids: Sequence[str]
    load: Callable[[str], Any]
    """id → the client's examples; read when its turn comes, not before."""
    keys: Keys
    """One key per client, in the order of `ids`."""
    states: Mapping[str, ClientState]
    sizes: Sequence[int]
    """n_i, in the order of `ids`: clients of like sizes are run together."""
    packed: Packed | None = None
    """All clients' examples in few arrays, if they are in memory."""
    population: Sequence[int] = ()
    """n_i of all that may come in later rounds: programs for them are made in the first."""
    round: int = 0
    """t, from 0."""


class Traffic(NamedTuple):
    """Bytes that crossed a network, of the whole cohort."""

    up: int
    down: int


class RoundResult(NamedTuple):
    aggregate: Aggregate
    infos: Mapping[str, np.ndarray]
    """Each of the client info's scalars, for every client of the cohort."""
    accepted: np.ndarray
    """Whether a client's result entered the aggregate."""
    examples: np.ndarray
    """n_i."""
    states: Mapping[str, ClientState]
    failures: Mapping[str, str]
    """What went wrong, for each client that raised an error instead of giving a result."""
    bytes_up: int
    """What one client sends: its result and weight, as they are before they are summed."""
    traffic: Traffic | None = None
    """Where there was a network: what was sent."""


Engine = Callable[[ClientUpdate, Aggregation, Message, Cohort], RoundResult]


class OfAlgorithm(NamedTuple):
    """An engine that has to know the algorithm whose clients it runs, as on other machines."""

    make: Callable[[Algorithm, Params], tuple[Algorithm, Engine]]
    """(algorithm, θ) → the algorithm as the round loop runs it, and the engine."""


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How an engine uses the machine; what is not set, the engine chooses.

    None of it changes results by more than rounding.
    """

    device: str | None = None
    """Kind of device to run on: cpu, gpu or tpu; JAX's default if not given."""
    devices: int | None = None
    """How many devices to use (sharded); all if not given."""
    clients_in_flight: int | None = None
    """Clients that run side by side in one program, on each device."""
    workers: int | None = None
    """Programs that run at a time, each in a thread of its own."""
    matmul_precision: str = "default"
    """Precision of matrix products on accelerators: default, high or highest."""


def check_options(options: EngineOptions) -> None:
    """Refuse what this machine does not have."""
    for name in ("devices", "clients_in_flight", "workers"):
        value = getattr(options, name)
        if value is not None:
            check_integer(name, value, 1)
    if options.matmul_precision not in ("default", "high", "highest"):
        raise refuse(
            "matmul_precision", options.matmul_precision, "must be default, high or highest"
        )
    available = _list_devices(options)
    if options.devices is not None and options.devices > len(available):
        hint = ""
        if available[0].platform == "cpu":
            hint = (
                " (XLA_FLAGS=--xla_force_host_platform_device_count="
                f"{options.devices} divides a CPU)"
            )
        raise refuse("devices", options.devices, f"must be at most {len(available)}{hint}")


def choose_devices(options: EngineOptions) -> list[jax.Device]:
    """The devices to use, after `check_options`."""
    return _list_devices(options)[: options.devices]


def _list_devices(options: EngineOptions) -> list[jax.Device]:
    """All devices of the kind asked for."""
    try:
        return jax.devices(options.device)
    except RuntimeError:
        found = sorted({device.platform for device in jax.devices()})
        raise refuse(
            "device", options.device, f"not available; available: {', '.join(found)}"
        ) from None


@contextlib.contextmanager
def use_device(device: jax.Device, options: EngineOptions) -> Iterator[None]:
    """Run what is inside on the device, at the precision that the options say."""
    with contextlib.ExitStack() as stack:
        if options.device is not None:
            stack.enter_context(jax.default_device(device))
        if options.matmul_precision != "default":
            stack.enter_context(jax.default_matmul_precision(options.matmul_precision))
        yield


class Reports(NamedTuple):
    """What clients leave beside their share of the sum, gathered block by block."""

    infos: dict[str, np.ndarray]
    accepted: np.ndarray
    examples: np.ndarray
    states: dict[str, ClientState]


def no_reports(cohort: Cohort) -> Reports:
    """A client that reports nothing was not accepted and keeps its state."""
    size = len(cohort.ids)
    states = {name: cohort.states[name] for name in cohort.ids}
    return Reports({}, np.zeros(size, bool), np.zeros(size, np.int64), states)


def record(
    reports: Reports,
    cohort: Cohort,
    lane_of: Mapping[int, int],
    infos: Any,
    accepted: Any,
    examples: Any,
    states: Any,
) -> None:
    """Enter a block's clients. `lane_of` maps positions in the cohort to lanes of the arrays."""
    members, lanes = list(lane_of), list(lane_of.values())
    for name, values in infos._asdict().items():
        blank = np.full(len(cohort.ids), np.nan)
        reports.infos.setdefault(name, blank)[members] = np.asarray(values)[lanes]
    reports.accepted[members] = np.asarray(accepted)[lanes]
    reports.examples[members] = np.asarray(examples)[lanes]
    if jax.tree.leaves(states):
        for member, lane in lane_of.items():
            reports.states[cohort.ids[member]] = jax.tree.map(lambda x: np.array(x[lane]), states)


def num_bytes(tree: Any) -> int:
    """The size of a tree's arrays, or of the arrays their shapes describe."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
