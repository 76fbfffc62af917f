"""Run a cohort block by block: load, run, add up in a fixed order.

Blocks may run in several threads; their sums are merged in the order of the blocks, so the result
is the same bits whichever finishes first. No more blocks are in flight than there are workers, and
memory does not grow with the number of clients.
"""

import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from fedpa.algorithms.fedopt import Message
from fedpa.engines.blocks import Block, capacity_for
from fedpa.engines.engine import Cohort, RoundResult, no_reports, record
from fedpa.engines.program import Lanes, Outcome, Program
from fedpa.engines.resident import Resident, map_lanes
from fedpa.errors import DataError, FedpaError
from fedpa.objectives.client_data import ClientData, Kind, kind_of

A = TypeVar("A")
B = TypeVar("B")
ASKED = 3
"""Clients whose arrays tell what all should have."""


class Loaded(NamedTuple):
    """A block's clients, read and padded, in host memory."""

    lanes: Lanes
    lane_of: dict[int, int]
    """Position in the cohort → lane, of the clients that are there."""
    failures: dict[str, str]


def run_blocks(
    program: Program,
    message: Message,
    cohort: Cohort,
    blocks: Sequence[Block],
    workers: int,
    kind: Kind,
    resident: Any = None,
) -> tuple[RoundResult, Lanes]:
    """Run all blocks and put the round together. Clients must have arrays of `kind`.

    Returns the round (its `bytes_up` 0, not yet known) and the lanes of one of its blocks.
    """
    keys = raw_keys(cohort)
    total: Any = None
    like: Any = None
    reports = no_reports(cohort)
    failures: dict[str, str] = {}

    def work(block: Block) -> tuple[Loaded, list[tuple[Loaded, Outcome]]]:
        loaded = load_block(cohort, keys, block, kind, resident)
        return loaded, _run(program, message, cohort, loaded)

    left: list[tuple[Any, ...]] = []
    with contextlib.closing(run_in_order(work, blocks, workers)) as finished:
        for loaded, outcomes in finished:
            failures |= loaded.failures
            if like is None and loaded.lane_of:
                like = loaded.lanes
            for part, out in outcomes:
                total = out.total if total is None else program.merge(total, out.total)
                left.append((part.lane_of, part.lanes.data.n, out._replace(total=())))
    if total is None:
        raise every_client_failed(failures)
    aggregate = program.value(total)
    found = jax.device_get([out for *_, out in left])  # one transfer for all
    for (lane_of, n, _), out in zip(left, found, strict=True):
        record(reports, cohort, lane_of, out.infos, out.accepted, n, out.states)
    return RoundResult(aggregate, *reports, failures, bytes_up=0), like


def raw_keys(cohort: Cohort) -> np.ndarray:
    return np.asarray(jax.random.key_data(cohort.keys))


def every_client_failed(failures: Mapping[str, str]) -> FedpaError:
    name, text = next(iter(failures.items()))
    return FedpaError(f"every client of the round failed; the first, client {name!r}: {text}")


def run_in_order(
    work: Callable[[Block], Any], blocks: Sequence[Block], workers: int
) -> Generator[Any]:
    """work(block) for every block, in order, with up to `workers` of them at a time.

    Closed early (by Ctrl-C, say), it starts no more of them and waits for those that run.
    """
    if workers == 1 or len(blocks) == 1:
        yield from map(work, blocks)
        return
    work = bind_settings(work)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fedpa-clients")
    pending: deque[Future[Any]] = deque()
    try:
        for block in blocks:
            pending.append(pool.submit(work, block))
            if len(pending) > workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def bind_settings(work: Callable[[A], B]) -> Callable[[A], B]:
    """`work` with the JAX settings of the thread that binds it, in any thread that calls it."""
    config: Any = jax.config
    x64 = config.jax_enable_x64
    device = config.jax_default_device
    precision = config.jax_default_matmul_precision

    def scoped(argument: A) -> B:
        with (
            jax.enable_x64(x64),
            jax.default_device(device),
            jax.default_matmul_precision(precision),
        ):
            return work(argument)

    return scoped


def _run(
    program: Program, message: Message, cohort: Cohort, loaded: Loaded
) -> list[tuple[Loaded, Outcome]]:
    """The block's outcome; if a client raises while it runs, those of the others, one by one."""
    if not loaded.lane_of:
        return []
    try:
        return [(loaded, jax.block_until_ready(program.run(message, loaded.lanes)))]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            lanes = loaded.lanes.keys.shape[0]
            what = (
                "lower clients_in_flight" if lanes > 1 else "lower workers, or take fewer samples"
            )
            raise FedpaError(
                f"{lanes} clients in flight do not fit in memory: {what} ({line(error)})"
            ) from None
        if loaded.lanes.keys.shape[0] == 1:
            loaded.failures[cohort.ids[next(iter(loaded.lane_of))]] = line(error)
            return []
    outcomes = []
    for member, lane in loaded.lane_of.items():
        alone = _lane(loaded.lanes, lane)
        outcomes += _run(program, message, cohort, Loaded(alone, {member: 0}, loaded.failures))
    return outcomes


def load_block(
    cohort: Cohort, keys: np.ndarray, block: Block, kind: Kind, resident: Any = None
) -> Loaded:
    """Read the block's clients and stack them, padded; a lane without a client has n = 0.

    A client that can't be read, or whose arrays are of another kind, is left out and named.
    resident: the cohort's packed arrays, if they are on the device.
    """
    if resident is not None:
        lanes = point_to_rows(cohort, resident, keys, block)
        return Loaded(lanes, {m: lane for lane, m in enumerate(block.members)}, {})
    found, failures = read_clients(cohort, block.members, kind)
    # What a client said of its size may have been too little.
    rows = max((len(arrays[0]) for arrays in found.values()), default=0)
    if rows > block.capacity:
        block = block._replace(capacity=capacity_for(rows, ()))
    lane_of = {m: lane for lane, m in enumerate(block.members) if m in found}
    return Loaded(stack_clients(cohort, keys, block, found, kind), lane_of, failures)


def read_clients(
    cohort: Cohort, members: Sequence[int], kind: Kind
) -> tuple[dict[int, list[np.ndarray]], dict[str, str]]:
    """The arrays of each client that can be read, and what was wrong with the others."""
    found, failures = {}, {}
    for member in members:
        name = cohort.ids[member]
        try:
            leaves, structure = jax.tree.flatten(cohort.load(name))
            arrays = [np.asarray(leaf) for leaf in leaves]
            own = kind_of(arrays, structure)
        except DataError:
            raise  # a broken file is not a client's failure
        except Exception as error:
            failures[name] = line(error)
            continue
        if own == kind:
            found[member] = arrays
        else:
            failures[name] = f"has arrays {own}: the others have {kind}"
    return found, failures


def find_kind(cohort: Cohort) -> Kind:
    """What most of the cohort's first clients have; every process asks the same ones."""
    kinds: Counter[Kind] = Counter()
    failures: dict[str, str] = {}
    for name in cohort.ids:
        try:
            leaves, structure = jax.tree.flatten(cohort.load(name))
            kinds[kind_of([np.asarray(leaf) for leaf in leaves], structure)] += 1
        except DataError:
            raise
        except Exception as error:
            failures[name] = line(error)
        if kinds.total() == ASKED:
            break
    if not kinds:
        raise every_client_failed(failures)
    return kinds.most_common(1)[0][0]


def stack_clients(
    cohort: Cohort,
    keys: np.ndarray,
    block: Block,
    found: Mapping[int, Sequence[np.ndarray]],
    kind: Kind,
) -> Lanes:
    """One array for all lanes from each of the clients' arrays."""
    shape = (block.lanes, block.capacity)
    arrays = [np.empty((*shape, *each), dtype) for each, dtype in kind.arrays]
    n = np.zeros(block.lanes, np.int32)
    for lane in range(block.lanes):
        values = found.get(block.members[lane], ()) if lane < len(block.members) else ()
        rows = len(values[0]) if values else 0
        n[lane] = rows
        for place, array in enumerate(arrays):
            if rows:
                array[lane, :rows] = values[place]
            array[lane, rows:] = 0
    data = ClientData(jax.tree.unflatten(kind.structure, arrays), n)  # type: ignore[arg-type]
    return _lanes(cohort, keys, block, data)


def point_to_rows(cohort: Cohort, resident: Any, keys: np.ndarray, block: Block) -> Lanes:
    """The same for clients whose examples are on the device: only where they begin is sent."""
    assert cohort.packed is not None
    n, start = np.zeros((2, block.lanes), np.int32)
    n[: len(block.members)] = [cohort.sizes[member] for member in block.members]
    pack = cohort.packed
    places = [pack.position[cohort.ids[member]] for member in block.members]
    start[: len(block.members)] = pack.start[places]
    return _lanes(cohort, keys, block, Resident(resident, start, n, block.capacity))


def _lanes(cohort: Cohort, keys: np.ndarray, block: Block, data: ClientData | Resident) -> Lanes:
    # A lane without a client has the first one's key and state; nothing comes of them.
    first = block.members[0] if block.members else 0
    lanes = [*block.members, *[first] * (block.lanes - len(block.members))]
    states = cohort.states[cohort.ids[first]]
    if jax.tree.leaves(states):
        each = [cohort.states[cohort.ids[member]] for member in lanes]
        states = jax.tree.map(lambda *x: np.stack([np.asarray(leaf) for leaf in x]), *each)
    return Lanes(data, states, keys[lanes])  # type: ignore[arg-type]


def _lane(lanes: Lanes, lane: int) -> Lanes:
    """One lane as a block of its own."""

    def cut(x: Any) -> Any:
        return x[lane : lane + 1]

    return Lanes(map_lanes(cut, lanes.data), jax.tree.map(cut, lanes.states), cut(lanes.keys))


def line(error: BaseException) -> str:
    """An error in one line; of one that quotes another's traceback, what that one says."""
    quoted = re.findall(r"^[\w.]*(?:Error|Exception): .*", str(error), re.MULTILINE)
    if "Traceback" in str(error) and quoted:
        return quoted[-1][:300]
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text[:300]}"
