"""Run a cohort block by block: load, run, add up in a fixed order.

Blocks may run in several threads; their sums are merged in the order of the blocks, so the result
is the same bits whichever finishes first. No more blocks are in flight than there are workers, and
memory does not grow with the number of clients.
"""

import contextlib
import functools
import re
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import Block, Plan, Width, capacity_for, plan_blocks
from fedpa.engines.engine import (
    Cohort,
    Engine,
    Report,
    RoundResult,
    collect_reports,
    num_bytes,
    raw_keys,
)
from fedpa.engines.machine import DoesNotFit, use_device
from fedpa.engines.options import EngineOptions
from fedpa.engines.program import (
    Lanes,
    Outcome,
    Program,
    Rows,
    Shared,
    prepare_shapes,
    shape_of_result,
)
from fedpa.errors import DataError, FedpaError
from fedpa.objectives.client_data import ClientData, Kind, kind_of
from fedpa.server.aggregation import Aggregation

A = TypeVar("A")
B = TypeVar("B")


class ClientError(Exception):
    """A client's update failed while it ran; the message is complete."""


class Part(NamedTuple):
    """A block that has run, or one of its clients that ran alone."""

    members: Sequence[int]
    """Positions in the cohort, of the first lanes."""
    n: Any
    outcome: Outcome


def launch_here(
    program: Program,
    shared: Shared,
    cohort: Cohort,
    block: Block,
    lanes: Lanes,
    failures: dict[str, str],
) -> list[Part]:
    """Run a block and wait for it; if a client raises while it runs, run each client alone."""
    width = lanes.keys.shape[0]
    if all(cohort.ids[member] in failures for member in block.members):
        return []
    try:
        out = jax.block_until_ready(program.find(shared, lanes)(shared, lanes))
        return [Part(block.members, lanes.data.n, out)]
    except (ClientError, jax.errors.JaxRuntimeError) as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            what = "lower clients_in_flight" if width > 1 else "lower workers, or use fewer samples"
            raise FedpaError(
                f"{width} clients in flight do not fit in memory: {what} ({line(error)})"
            ) from None
        if width == 1:
            failures[cohort.ids[block.members[0]]] = line(error)
            return []
    parts = []
    for lane, member in enumerate(block.members):
        alone, only = Block((member,), 1, block.capacity), slice(lane, lane + 1)
        own = jax.tree.map(lambda x, only=only: x[only], lanes)
        parts += launch_here(program, shared, cohort, alone, own, failures)
    return parts


def agree_here(
    cohort: Cohort, total: Any, failures: dict[str, str], problem: Exception | None
) -> None:
    if problem is not None:
        raise problem


class Placement(NamedTuple):
    """Where blocks run. Default: all lanes on one device of this process."""

    own: Callable[[Block], Sequence[int]] = lambda block: range(block.lanes)
    """The lanes whose clients this process reads."""
    grows: bool = True
    """Whether a block may have more rows than planned; not if other processes make parts of it."""
    launch: Callable[..., list[Part]] = launch_here
    """(program, shared, cohort, block, its own lanes, failures) → what has run, or is running."""
    agree: Callable[..., None] = agree_here
    """(cohort, sum, failures, error) → wait for all, complete failures, raise if any has failed."""
    gather: Callable[[Any], Any] = jax.device_get
    """Arrays of all lanes → on the host."""
    devices: int = 1
    """Number of processes that share a block."""


Source = Callable[[Cohort], tuple[Kind | None, Any]]
"""Cohort → what its clients' arrays are; or None, and their packed arrays on the device."""


def run_blocks(
    program: Program,
    message: Message,
    cohort: Cohort,
    plan: Plan,
    source: Source = lambda cohort: (find_kind(cohort), None),
    placement: Placement = Placement(),
    pool: ThreadPoolExecutor | None = None,
) -> RoundResult:
    """Run all blocks and put the round together.

    Args:
        program: The client update.
        message: What all clients receive.
        cohort: The round's clients.
        plan: How they are divided into blocks.
        source: Where their examples come from; default: they are read one by one.
        placement: Where they run; default: on one device.
        pool: Threads that run blocks; default: one block after the other.
    """
    keys = raw_keys(cohort)
    own, grows, launch, agree, gather, _ = placement
    total: Any = None
    like: Any = None
    parts: list[Part] = []
    failures: dict[str, str] = {}
    problem: Exception | None = None
    is_new, sizes = program.bytes_up is None, list[int]()
    try:
        kind, arrays = source(cohort)
        shared = Shared(message, arrays)

        def work(block: Block) -> tuple[Lanes, dict[str, str], list[Part]]:
            lanes, failed = load_block(cohort, keys, block, own(block), kind, grows)
            if is_new and block == plan.blocks[0]:
                sent = shape_of_result(program.client, shared, lanes)
                program.check_sum(sent, cohort.usual_size)
                sizes.append(num_bytes(sent))
            return lanes, failed, launch(program, shared, cohort, block, lanes, failed)

        with contextlib.closing(run_in_order(work, plan.blocks, plan.workers, pool)) as finished:
            for lanes, failed, ran in finished:
                failures |= failed
                like = lanes if like is None else like
                for members, n, out in ran:
                    total = out.total if total is None else program.merge(total, out.total)
                    parts.append(Part(members, n, out._replace(total=())))
    except Exception as error:
        problem = error
    agree(cohort, total, failures, problem)
    check_any(cohort, failures)
    aggregate = program.value(total)
    reports = [
        Report(part.members, out.infos._asdict(), out.accepted, n, out.states)
        for part, (n, out) in zip(parts, gather([part[1:] for part in parts]), strict=True)
    ]
    if is_new:
        program.bytes_up = sizes[0]
        prepare_shapes(program, shared, like, cohort.population, plan)
    return collect_reports(cohort, aggregate, reports, failures, program.bytes_up or 0)


def build_engine(
    options: EngineOptions,
    device: jax.Device,
    choose: Callable[[Message, Cohort], Width],
    compile_for: Callable[[ClientUpdate, Aggregation, int], Program],
    source: Source = lambda cohort: (find_kind(cohort), None),
    placement: Placement = Placement(),
) -> Engine:
    """Build an engine. It keeps the programs it has compiled for as long as it lives.

    Args:
        options: Settings that override the chosen width.
        device: Where arrays are put by default.
        choose: (message, cohort) → how wide to run it, on each device.
        compile_for: (client update, aggregation, workers) → a new program.
        source: Where clients' examples come from.
        placement: Where blocks run.
    """
    find_program = functools.cache(compile_for)
    find_pool = functools.cache(make_pool)
    narrower: dict[ClientUpdate, Width] = {}

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        width = narrower.get(client) or choose(message, cohort)
        width = Width(options.clients_in_flight or width.lanes, options.workers or width.workers)
        program = find_program(client, aggregation, width.workers)
        try:
            with use_device(device, options):
                plan = plan_blocks(cohort, width, placement.devices)
                pool = find_pool(plan.workers)
                return run_blocks(program, message, cohort, plan, source, placement, pool)
        except DoesNotFit:
            if options.clients_in_flight or options.workers or width == Width(1, 1):
                raise
            narrower[client] = Width(max(width.lanes // 2, 1), 1)
            return run(client, aggregation, message, cohort)

    return run


def check_any(cohort: Cohort, failures: Mapping[str, str]) -> None:
    """Refuse a round in which every client failed."""
    if len(failures) == len(cohort.ids):
        name, text = next(iter(failures.items()))
        raise FedpaError(f"every client of the round failed; the first, client {name!r}: {text}")


def make_pool(workers: int) -> ThreadPoolExecutor:
    """Make the threads of an engine; they start with the first round and end with the engine."""
    return ThreadPoolExecutor(workers, thread_name_prefix="fedpa-clients")


def run_in_order(
    work: Callable[[A], B], blocks: Sequence[A], workers: int, pool: ThreadPoolExecutor | None
) -> Generator[B]:
    """Yield work(block) for every block, in order, with up to `workers` at a time.

    If it is closed early (by Ctrl-C), it starts no more blocks and waits for those that run.
    """
    if pool is None or workers == 1 or len(blocks) == 1:
        yield from map(work, blocks)
        return
    work = bind_settings(work)
    pending: deque[Future[B]] = deque()
    try:
        for block in blocks:
            pending.append(pool.submit(work, block))
            if len(pending) > workers:
                yield pending[0].result()
                pending.popleft()
        while pending:
            yield pending[0].result()
            pending.popleft()
    finally:
        wait([future for future in pending if not future.cancel()])


def bind_settings(work: Callable[[A], B]) -> Callable[[A], B]:
    """Bind the JAX settings of this thread to `work`, for calls in other threads."""
    config: Any = jax.config
    x64 = config.jax_enable_x64
    device = config.jax_default_device
    precision = config.jax_default_matmul_precision

    def run_scoped(argument: A) -> B:
        with (
            jax.enable_x64(x64),
            jax.default_device(device),
            jax.default_matmul_precision(precision),
        ):
            return work(argument)

    return run_scoped


def load_block(
    cohort: Cohort,
    keys: np.ndarray,
    block: Block,
    own: Sequence[int],
    kind: Kind | None,
    grows: bool,
) -> tuple[Lanes, dict[str, str]]:
    """Read the clients of some lanes of a block and stack them, padded.

    A lane without a client has n = 0. A client that can't be read, or whose arrays are of another
    kind, is left out and named. Without a kind the clients are packed: only where their rows begin
    is sent. If the block does not grow, a client with more examples than announced fails.
    """
    members = [block.members[lane] for lane in own if lane < len(block.members)]
    data: ClientData | Rows
    failures: dict[str, str] = {}
    if kind is None:
        assert cohort.packed is not None
        places = [cohort.packed.position[cohort.ids[member]] for member in members]
        n, start = np.zeros((2, len(own)), np.int32)
        n[: len(places)] = cohort.packed.sizes[places]
        start[: len(places)] = cohort.packed.start[places]
        data = Rows(start, n, capacity_for(int(n.max()), (block.capacity,)))
    else:
        most = None if grows else block.capacity
        clients, failures = read_clients(cohort, members, kind, most)
        data = stack_clients(clients, len(own), block.capacity, kind)
    # A lane without a client has the first one's key and state, which are not used.
    members += block.members[:1] * (len(own) - len(members))
    each = [cohort.states[cohort.ids[member]] for member in members]
    states = each[0]
    if jax.tree.leaves(states):
        states = jax.tree.map(lambda *x: np.stack([np.asarray(leaf) for leaf in x]), *each)
    return Lanes(data, states, keys[members]), failures  # type: ignore[arg-type]


def read_clients(
    cohort: Cohort, members: Sequence[int], kind: Kind, most: int | None
) -> tuple[list[list[np.ndarray]], dict[str, str]]:
    """Read the arrays of each client, [] for unusable ones, and the reasons."""
    clients: list[list[np.ndarray]] = []
    failures: dict[str, str] = {}
    for member in members:
        name = cohort.ids[member]
        arrays, own = _read_client(cohort, name, failures)
        if own is not None and own != kind:
            failures[name] = f"has arrays {own}: the others have {kind}"
        elif arrays and most is not None and len(arrays[0]) > most:
            announced = f"{cohort.sizes[member]} were announced"
            failures[name] = f"has {len(arrays[0])} examples where {announced}"
        clients.append([] if name in failures else arrays)
    return clients, failures


def find_kind(cohort: Cohort) -> Kind:
    """What the cohort's first client has, of those that can be read, in every process."""
    failures: dict[str, str] = {}
    kinds = (_read_client(cohort, name, failures)[1] for name in cohort.ids)
    kind = next((kind for kind in kinds if kind is not None), None)
    check_any(cohort, failures)
    assert kind is not None
    return kind


def _read_client(
    cohort: Cohort, name: str, failures: dict[str, str]
) -> tuple[list[np.ndarray], Kind | None]:
    try:
        leaves, structure = jax.tree.flatten(cohort.load(name))
        arrays = [np.asarray(leaf) for leaf in leaves]
        return arrays, kind_of(arrays, structure)
    except DataError:
        raise  # a damaged file is not a client's failure
    except Exception as error:
        failures[name] = line(error)
        return [], None


def stack_clients(
    clients: Sequence[Sequence[np.ndarray]], lanes: int, capacity: int, kind: Kind
) -> ClientData:
    """One array for all lanes from each of the clients' arrays; longer than planned if need be."""
    n = np.zeros(lanes, np.int32)
    n[: len(clients)] = [len(arrays[0]) if arrays else 0 for arrays in clients]
    shape = (lanes, capacity_for(int(n.max()), (capacity,)))
    stacked = [np.empty((*shape, *each), dtype) for each, dtype in kind.arrays]
    for lane, rows in enumerate(n):
        for place, array in enumerate(stacked):
            if rows:
                array[lane, :rows] = clients[lane][place]
            array[lane, rows:] = 0
    return ClientData(jax.tree.unflatten(kind.structure, stacked), n)  # type: ignore[arg-type]


def line(error: BaseException) -> str:
    """Format an error in one line; if it quotes a traceback, the quoted error."""
    if isinstance(error, ClientError):
        return str(error)
    quoted: list[str] = re.findall(r"^[\w.]*(?:Error|Exception): .*", str(error), re.MULTILINE)
    if "Traceback" in str(error) and quoted:
        return quoted[-1][:300]
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"
