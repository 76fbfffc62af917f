"""The local engine, the default: on this machine, in the way that suits model, clients and devices.

- several devices: sharded over them;
- a small model and more than one client: vectorized;
- else: one client after the other.
"""

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.options import EngineOptions, check_options, chosen_devices
from fedpa.engines.per_client import per_client
from fedpa.engines.sharded import sharded
from fedpa.engines.vectorized import gains, vectorized
from fedpa.server.aggregation import Aggregation


def local(options: EngineOptions = EngineOptions()) -> Engine:
    check_options(options)
    devices = chosen_devices(options)
    if len(devices) > 1:
        return sharded(options)
    alone, together = per_client(options), vectorized(options)

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        engine = together if gains(message, cohort) else alone
        return engine(client, aggregation, message, cohort)

    return run


ENGINE = local
