"""The sharded engine: clients dealt to the devices of a mesh, of one process or of many.

Every device runs its lanes of a block by itself and keeps a running sum of its own; the devices
talk once a round, when the sums are gathered and merged in the order of the devices. With several
processes (`jax.distributed`, see `fedpa.engines.distributed`) each reads only its own clients.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import (
    MOST_LANES,
    Block,
    blocks,
    capacities,
    ladder,
    should_vectorize,
)
from fedpa.engines.device_memory import check_fits
from fedpa.engines.engine import (
    Cohort,
    Engine,
    EngineOptions,
    RoundResult,
    check_options,
    choose_devices,
    no_reports,
    record,
    use_device,
)
from fedpa.engines.execution import (
    Loaded,
    every_client_failed,
    find_kind,
    raw_keys,
    read_clients,
    stack_clients,
)
from fedpa.engines.program import (
    Check,
    Lanes,
    Outcome,
    Program,
    bytes_of_result,
    compile_ahead,
    merge_pairwise,
    prepare_shapes,
    run_lanes,
)
from fedpa.errors import FedpaError, refuse
from fedpa.objectives.client_data import ClientData, Kind
from fedpa.server.aggregation import Aggregation

AXIS = "clients"
AHEAD = 2
"""Blocks that may wait on the devices while the host reads the next."""


def sharded(options: EngineOptions = EngineOptions()) -> Engine:
    check_options(options)
    devices = choose_devices(options)
    mesh = Mesh(np.array(devices), (AXIS,))
    programs: dict[tuple[ClientUpdate, Aggregation], Program] = {}
    sent: dict[ClientUpdate, int] = {}
    own = [device for device in devices if device.process_index == jax.process_index()]
    if {device.process_index for device in devices} != set(range(jax.process_count())):
        raise refuse("devices", options.devices, "every process needs at least one of them")

    def check(size: int, lanes: int) -> None:
        # Forced host devices share the memory of one machine.
        sharing = len(own) if own[0].platform == "cpu" else 1
        check_fits(size, max(lanes // len(devices), 1), sharing, own[0])

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        key = (client, aggregation)
        if key not in programs:
            programs[key] = compile_for_mesh(client, aggregation, mesh, check)
        program = programs[key]
        known = capacities(cohort.population or cohort.sizes)
        widths = [len(devices) * lanes for lanes in ladder(lanes_per_device(message, cohort))]
        made = blocks(cohort.sizes, widths, known)
        everywhere = jax.tree.map(lambda x: replicate(x, mesh), message)
        with use_device(own[0], options):
            result, like = run_on_mesh(program, everywhere, cohort, made, mesh)
            if client not in sent:
                sent[client] = bytes_of_result(client, everywhere, like)
                prepare_shapes(program, everywhere, like, cohort.population, known, widths)
        return result._replace(bytes_up=sent[client])

    def lanes_per_device(message: Message, cohort: Cohort) -> int:
        if options.clients_in_flight is not None:
            return options.clients_in_flight
        if not should_vectorize(message, cohort):
            return 1
        return min(math.ceil(len(cohort.ids) / len(devices)), MOST_LANES)

    return run


def compile_for_mesh(
    client: ClientUpdate, aggregation: Aggregation, mesh: Mesh, check: Check
) -> Program:
    """The program for a mesh: sums have a leading axis, one entry for each device."""
    run_own = run_lanes(client, aggregation)

    def on_each(message: Any, lanes: Lanes) -> Outcome:
        out = run_own(message, lanes)
        return out._replace(total=jax.tree.map(lambda x: x[None], out.total))

    run = jax.shard_map(
        on_each, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS), check_vma=False
    )
    shardings = (NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS)))
    return Program(
        *compile_ahead(run, check, in_shardings=shardings),
        jax.jit(jax.vmap(aggregation.merge), donate_argnums=0),
        jax.jit(
            lambda totals: aggregation.value(merge_pairwise(aggregation, totals)),
            out_shardings=NamedSharding(mesh, P()),
        ),
    )


def run_on_mesh(
    program: Program, message: Message, cohort: Cohort, made: list[Block], mesh: Mesh
) -> tuple[RoundResult, Lanes]:
    """The round (its `bytes_up` 0, not yet known) and the lanes of one of its blocks."""
    keys = raw_keys(cohort)
    total: Any = None
    like: Any = None
    running: list[tuple[dict[int, int], Any, Outcome]] = []
    failures: dict[str, str] = {}
    problem: Exception | None = None
    try:
        kind = find_kind(cohort)
        for block in made:
            loaded = load_own(cohort, keys, block, kind, mesh)
            failures |= loaded.failures
            like = loaded.lanes if like is None else like
            lanes = jax.tree.map(lambda x: deal(x, block.lanes, mesh), loaded.lanes)
            out = program.run(message, lanes)
            total = out.total if total is None else program.merge(total, out.total)
            running.append((loaded.lane_of, lanes.data.n, out._replace(total=())))
            if len(running) > AHEAD:
                jax.block_until_ready(running[-AHEAD - 1][2].accepted)
        jax.block_until_ready(total)
    except Exception as error:
        problem = error
    # All must know before any waits for the others' numbers.
    if _any_process(np.array([problem is not None], np.int32)).any():
        raise problem or FedpaError("another process could not run its clients: see what it says")

    reports = no_reports(cohort)
    failed = np.zeros(len(cohort.ids), np.int32)
    for lane_of, sizes, out in running:
        infos, accepted, states, n = gather((out.infos, out.accepted, out.states, sizes))
        record(reports, cohort, lane_of, infos, accepted, n, states)
    for index, name in enumerate(cohort.ids):
        failed[index] = name in failures
    for place in np.flatnonzero(_any_process(failed)).tolist():
        failures.setdefault(cohort.ids[place], "failed in another process")
        reports.accepted[place] = False
        reports.states[cohort.ids[place]] = cohort.states[cohort.ids[place]]
    if not reports.accepted.any() and len(failures) == len(cohort.ids):
        raise every_client_failed(failures)
    # From the mesh to where the server works: its copy on this process's first device.
    aggregate = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x.addressable_data(0))), program.value(total)
    )
    return RoundResult(aggregate, *reports, failures, bytes_up=0), like


def load_own(cohort: Cohort, keys: np.ndarray, block: Block, kind: Kind, mesh: Mesh) -> Loaded:
    """The lanes of this process's devices, read and padded."""
    per_device = block.lanes // mesh.size
    own = [
        lane
        for place, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
        for lane in range(place * per_device, (place + 1) * per_device)
    ]
    mine = [block.members[lane] for lane in own if lane < len(block.members)]
    found, failures = read_clients(cohort, mine, kind)
    for member in list(found):
        rows = len(found[member][0])
        if rows > block.capacity:  # the other processes have made their arrays
            failures[cohort.ids[member]] = (
                f"has {rows} examples where {cohort.sizes[member]} were announced"
            )
            del found[member]
    padded = [block.members[min(lane, len(block.members) - 1)] for lane in own]
    lanes = stack_clients(cohort, keys, Block(tuple(padded), len(own), block.capacity), found, kind)
    # Lanes beyond the block's clients repeat one: they must not count a second time.
    n = np.array(
        [n if lane < len(block.members) else 0 for lane, n in zip(own, lanes.data.n, strict=True)]
    )
    data = ClientData(lanes.data.examples, n.astype(np.int32))  # type: ignore[union-attr, arg-type]
    lanes = lanes._replace(data=data)
    return Loaded(lanes, {m: lane for lane, m in enumerate(block.members)}, failures)


def deal(local: Any, lanes: int, mesh: Mesh) -> jax.Array:
    """This process's lanes as its part of an array over the whole mesh."""
    shape = (lanes, *np.shape(local)[1:])
    local = np.asarray(local).astype(jax.dtypes.canonicalize_dtype(np.asarray(local).dtype))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P(AXIS)), local, shape)


def replicate(x: Any, mesh: Mesh) -> jax.Array:
    """A copy on every device."""
    host = np.asarray(x)
    return jax.make_array_from_callback(
        host.shape, NamedSharding(mesh, P()), lambda index: host[index]
    )


def gather(tree: Any) -> Any:
    """All lanes of arrays over the mesh, on the host of every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _any_process(flags: np.ndarray) -> np.ndarray:
    if jax.process_count() == 1:
        return flags
    return np.asarray(multihost_utils.process_allgather(flags)).max(axis=0)
