"""The per-client engine: each client's update is one compiled program, its loops inside.

For large models. Their matrix products keep several cores busy, so that clients in turn are as fast
as clients side by side; a machine with many cores runs several clients at a time.
"""

from fedpa.algorithms.fedopt import Message
from fedpa.cores import cores
from fedpa.engines.compiled import Width, one_device
from fedpa.engines.engine import Cohort, Engine
from fedpa.engines.options import EngineOptions

CORES_PER_CLIENT = 8
"""More than a large model's products use well at the batch sizes of federated learning."""


def per_client(options: EngineOptions = EngineOptions()) -> Engine:
    return one_device(options, width)


def width(message: Message, cohort: Cohort) -> Width:
    return Width(1, max(cores() // CORES_PER_CLIENT, 1))


ENGINE = per_client
