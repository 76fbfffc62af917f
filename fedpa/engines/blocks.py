"""Blocks: which clients run together, how many at a time, and the sizes of their arrays.

A block is a few clients side by side in the lanes of one program. Its loops run until its largest
client is done, so lanes of smaller clients compute padding: blocks are made of clients of like
sizes, and no block may waste more than a fifth. The sizes of arrays and the numbers of lanes come
from short lists, so that few programs serve every cohort.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fedpa.algorithms.fedopt import Message
from fedpa.engines.engine import Cohort, num_bytes
from fedpa.engines.machine import count_cores

MOST_CAPACITIES = 3
FINE_UP_TO = 128
"""Rows up to which one capacity does for all: padding costs less than compiling."""
RATIO = 4
"""Least ratio between capacities."""
WASTE = 0.2
"""Largest share of a block that may be padding."""
WORTHWHILE = 8
"""Lanes below which a width of its own is not worth compiling for."""
CORES_PER_CLIENT = 8
"""More than a large model's products use well at the batch sizes of federated learning."""
MOST_LANES = 64
FEWEST_LANES = 8
"""Smallest block that is worth vectorizing."""
SMALL = 2**18
"""Bytes of a message up to which vectorizing over clients is faster on a CPU, measured."""
SMALL_ELSEWHERE = 2**26
"""The same for accelerators, which want more work at a time."""


class Width(NamedTuple):
    lanes: int
    """Clients per program."""
    workers: int
    """Programs at the same time."""


def choose_width(message: Message, cohort: Cohort) -> Width:
    return (side_by_side if should_vectorize(message, cohort) else one_at_a_time)(message, cohort)


def should_vectorize(message: Message, cohort: Cohort) -> bool:
    """Whether the model is small enough to gain from vectorizing over clients."""
    limit = SMALL if jax.default_backend() == "cpu" else SMALL_ELSEWHERE
    return cohort.usual_size > 1 and num_bytes(message) <= limit


def one_at_a_time(message: Message, cohort: Cohort) -> Width:
    return Width(1, max(count_cores() // CORES_PER_CLIENT, 1))


def side_by_side(message: Message, cohort: Cohort) -> Width:
    """Blocks of equal width: as many as come out even over the workers, unless too small."""
    clients = cohort.usual_size
    if jax.default_backend() != "cpu":
        return Width(min(clients, 4 * MOST_LANES), 1)
    workers = count_cores()
    number = workers * math.ceil(clients / (workers * MOST_LANES))
    number = max(min(number, clients // FEWEST_LANES), 1)
    return Width(math.ceil(clients / number), workers)


class Block(NamedTuple):
    members: tuple[int, ...]
    """Positions in the cohort; lanes beyond them are empty."""
    lanes: int
    capacity: int
    """Rows of each lane's arrays."""


class Plan(NamedTuple):
    """How a cohort is divided into blocks."""

    blocks: Sequence[Block]
    workers: int = 1
    """Blocks that run at a time."""
    widths: Sequence[int] = ()
    """Numbers of lanes that blocks of later cohorts may have."""
    capacities: Sequence[int] = ()
    """Rows that lanes of later cohorts may have."""


def plan_blocks(cohort: Cohort, width: Width, devices: int = 1) -> Plan:
    """Divide a cohort into blocks of at most `width.lanes` lanes on each device."""
    known = capacities(cohort.population or cohort.sizes)
    widths = [devices * lanes for lanes in ladder(width.lanes)]
    return Plan(blocks(cohort.sizes, widths, known), width.workers, widths, known)


def capacities(sizes: Sequence[int]) -> tuple[int, ...]:
    """At most three capacities for clients of these sizes, in even ratios, the largest last.

    A client's rows are padded to the next of them. That costs memory and the sorting of row
    indices, not steps: the number of local steps follows from n_i alone.
    """
    positive = [n for n in sizes if n > 0] or [1]
    low, high = min(positive), max(positive)
    low = max(low, FINE_UP_TO)
    steps = int(np.clip(np.log(max(high / low, 1)) / np.log(RATIO), 0, MOST_CAPACITIES - 1))
    # From the top, so that the largest client has little padding.
    ratio = (high / low) ** (1 / (steps + 1)) if steps else 1.0
    return tuple(sorted({_round_up(high / ratio**step) for step in range(steps + 1)}))


def _round_up(n: int | float) -> int:
    """Up to a multiple of 8."""
    return 8 * int(np.ceil(np.ceil(n) / 8))


def capacity_for(n: int, known: Sequence[int]) -> int:
    """Choose the smallest known capacity for n rows; if none is large enough, a new one."""
    return next((size for size in known if size >= n), _round_up(max(n, 1)))


def ladder(lanes: int) -> tuple[int, ...]:
    """List the widths of programs: the full width, a quarter of a large one, and one."""
    few = {lanes // 4} if lanes >= 4 * WORTHWHILE else set()
    return tuple(sorted({lanes, *few, 1}, reverse=True))


def blocks(sizes: Sequence[int], widths: Sequence[int], known: Sequence[int]) -> list[Block]:
    """Divide clients into blocks, largest first, each as wide as padding allows.

    widths: numbers of lanes to choose from, widest first; the last is always allowed.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    made, start = [], 0
    while start < len(order):
        for width in widths:
            members = order[start : start + width]
            largest = max(sizes[members[0]], 1)
            used = sum(max(sizes[index], 1) for index in members)
            if used >= (1 - WASTE) * width * largest:
                break
        made.append(Block(tuple(members), width, capacity_for(sizes[members[0]], known)))
        start += len(members)
    return made
