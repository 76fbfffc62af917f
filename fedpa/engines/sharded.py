"""The sharded engine: clients divided among the devices of a mesh, of one process or of many.

Every device runs its lanes of a block and keeps its own running sum. The devices communicate once
per round, when the sums are gathered and merged in the order of the devices. With several
processes (`jax.distributed`, see `fedpa.engines.distributed`) each reads only its own clients.
"""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import MOST_LANES, Block, Width, should_vectorize
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.execution import Part, Placement, build_engine
from fedpa.engines.machine import check_fits, choose_devices
from fedpa.engines.options import EngineOptions
from fedpa.engines.program import (
    Lanes,
    Outcome,
    Program,
    Shared,
    check_sum,
    compile_ahead,
    compile_merge,
    run_lanes,
)
from fedpa.errors import FedpaError, refuse
from fedpa.server.aggregation import Aggregation, merge_pairwise

AXIS = "clients"
AHEAD = 2
"""Blocks that may wait on the devices while the host reads the next."""


def sharded(options: EngineOptions = EngineOptions()) -> Engine:
    """Build the engine that divides clients among several devices, of one process or of many.

    Args:
        options: How the machine is used; default: all devices.
    Returns:
        The engine, for `fedpa.fit(..., engine=…)`.
    Raises:
        FedpaError: This machine can't serve the options.
    Example:
        >>> engine = fedpa.engines.sharded(fedpa.engines.EngineOptions(devices=1))
    """
    devices = choose_devices(options)
    own = [device for device in devices if device.process_index == jax.process_index()]
    if {device.process_index for device in devices} != set(range(jax.process_count())):
        raise refuse("devices", options.devices, "every process needs at least one of them")
    mesh = Mesh(np.array(devices), (AXIS,))
    everywhere, dealt = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))

    def check(size: int, lanes: int) -> None:
        # Forced host devices share the memory of one machine.
        sharing = len(own) if own[0].platform == "cpu" else 1
        check_fits(size, max(lanes // len(devices), 1), sharing, own[0])

    def compile_for(client: ClientUpdate, aggregation: Aggregation, workers: int) -> Program:
        """The program for a mesh: sums have a leading axis, one entry for each device."""
        run_own = run_lanes(client, aggregation)

        def on_each(shared: Shared, lanes: Lanes) -> Outcome:
            out = run_own(shared, lanes)
            return out._replace(total=jax.tree.map(lambda x: x[None], out.total))

        run = jax.shard_map(
            on_each, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False
        )
        value = jax.jit(
            lambda totals: aggregation.value(merge_pairwise(aggregation, totals)),
            out_shardings=everywhere,
        )

        def fetch(x: jax.Array) -> jax.Array:
            """From the mesh to where the server works: the copy on this process's first device."""
            return jnp.asarray(np.asarray(x.addressable_data(0)))

        return Program(
            client,
            compile_ahead(run, check, in_shardings=(everywhere, dealt)),
            compile_merge(jax.vmap(aggregation.merge)),
            lambda totals: jax.tree.map(fetch, value(totals)),
            functools.partial(check_sum, aggregation, own[0]),
        )

    def choose(message: Message, cohort: Cohort) -> Width:
        if not should_vectorize(message, cohort):
            return Width(1, 1)
        return Width(min(math.ceil(cohort.usual_size / len(devices)), MOST_LANES), 1)

    # Blocks are launched one after the other, in the same order in every process.
    options = dataclasses.replace(options, workers=1)
    placement = place_on_mesh(mesh, dealt)
    run = build_engine(options, own[0], choose, compile_for, placement=placement)

    def replicate(x: Any) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, everywhere, lambda index: host[index])

    def run_on_mesh(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        return run(client, aggregation, jax.tree.map(replicate, message), cohort)

    return run_on_mesh


def place_on_mesh(mesh: Mesh, sharding: NamedSharding) -> Placement:
    """Deal the lanes of blocks to the devices of a mesh."""
    running: deque[Any] = deque()

    def own(block: Block) -> Sequence[int]:
        per_device = block.lanes // mesh.size
        return [
            lane
            for place, device in enumerate(mesh.devices.flat)
            if device.process_index == jax.process_index()
            for lane in range(place * per_device, (place + 1) * per_device)
        ]

    def launch(
        program: Program,
        shared: Shared,
        cohort: Cohort,
        block: Block,
        lanes: Lanes,
        failures: dict[str, str],
    ) -> list[Part]:
        def deal(x: Any) -> jax.Array:
            """This process's lanes as its part of an array over the whole mesh."""
            host = np.asarray(x)
            host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
            shape = (block.lanes, *host.shape[1:])
            dealt: jax.Array = jax.make_array_from_process_local_data(sharding, host, shape)
            return dealt

        lanes = jax.tree.map(deal, lanes)
        out = program.find(shared, lanes)(shared, lanes)
        running.append(out.accepted)
        if len(running) > AHEAD:
            jax.block_until_ready(running.popleft())
        return [Part(block.members, lanes.data.n, out)]

    def agree(
        cohort: Cohort, total: Any, failures: dict[str, str], problem: Exception | None
    ) -> None:
        if problem is None:
            try:
                jax.block_until_ready(total)
            except Exception as error:
                problem = error
        # All processes must know before any waits for the others' numbers.
        if in_any_process(np.array([problem is not None], np.int32)).any():
            raise problem or FedpaError("another process could not run its clients: see its error")
        failed = np.array([name in failures for name in cohort.ids], np.int32)
        for place in np.flatnonzero(in_any_process(failed)).tolist():
            failures.setdefault(cohort.ids[place], "failed in another process")

    return Placement(own, False, launch, agree, gather, mesh.size)


def gather(tree: Any) -> Any:
    """All lanes of arrays over the mesh, on the host of every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def in_any_process(flags: np.ndarray) -> np.ndarray:
    """Each flag, raised if any process raised it."""
    if jax.process_count() == 1:
        return flags
    raised: np.ndarray = np.asarray(multihost_utils.process_allgather(flags)).max(axis=0)
    return raised
