"""The vectorized engine: blocks of clients side by side in the lanes of one compiled program.

For small models, whose single operations are too short to be worth a core's while. On a CPU as many
blocks as there are cores run at a time, each in a thread of its own.
"""

import math

import jax

from fedpa.algorithms.fedopt import Message
from fedpa.cores import cores
from fedpa.engines.compiled import Width, one_device
from fedpa.engines.engine import Cohort, Engine, num_bytes
from fedpa.engines.options import EngineOptions

MOST_LANES = 64
FEWEST_LANES = 8
"""Below, a block is too small to gain from being one."""

SMALL = 2**18
"""Bytes of a message up to which clients on a CPU gain from running side by side, measured."""
SMALL_ELSEWHERE = 2**26
"""The same for accelerators, which want more work at a time."""


def vectorized(options: EngineOptions = EngineOptions()) -> Engine:
    return one_device(options, width)


def width(message: Message, cohort: Cohort) -> Width:
    """Blocks of equal width: as many as come out even over the workers, unless too small."""
    clients = len(cohort.ids)
    if jax.default_backend() != "cpu":
        return Width(min(clients, 4 * MOST_LANES), 1)
    workers = cores()
    number = workers * math.ceil(clients / (workers * MOST_LANES))
    number = max(min(number, clients // FEWEST_LANES), 1)
    return Width(math.ceil(clients / number), workers)


def gains(message: Message, cohort: Cohort) -> bool:
    """Whether the model is small enough for clients to gain from running side by side."""
    limit = SMALL if jax.default_backend() == "cpu" else SMALL_ELSEWHERE
    return len(cohort.ids) > 1 and num_bytes(message) <= limit


ENGINE = vectorized
