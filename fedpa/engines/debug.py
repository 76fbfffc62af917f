"""The debug engine: the same client update run eagerly, operation by operation, nothing compiled.

Slow; for stepping through a client update with a debugger or `print`.
"""

import jax

from fedpa.algorithms.algorithm import ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import program, run_cohort
from fedpa.server.aggregation import Aggregation


def debug() -> Engine:
    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        with jax.disable_jit():
            return run_cohort(program(client, aggregation), message, cohort)

    return run


ENGINE = debug
