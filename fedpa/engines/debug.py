"""The debug engine: the same client update run eagerly, one client at a time, nothing compiled.

Slow; for stepping through a client update with a debugger or `print`. Errors name the client, the
step and the value.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import Block, Plan
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.execution import ClientError, line, run_blocks
from fedpa.engines.machine import choose_devices
from fedpa.engines.options import EngineOptions
from fedpa.engines.program import Lanes, Outcome, Program, Run, Shared, run_lanes
from fedpa.server.aggregation import Aggregation
from fedpa.watching import not_finite, watched_by


def debug(options: EngineOptions = EngineOptions()) -> Engine:
    """Build the engine that runs clients one by one, in the cohort's order, uncompiled.

    Slow; for `print` and debuggers in a client update. A value that is not finite ends the client
    with an error that names client, step and value.

    Args:
        options: Checked as by the other engines, but not used.
    Returns:
        The engine, for `fedpa.fit(..., engine=…)`.
    Example:
        >>> engine = fedpa.engines.debug()
    """
    choose_devices(options)

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        eager = run_eagerly(run_lanes(client, aggregation))
        program = Program(client, lambda *_: eager, aggregation.merge, aggregation.value)
        blocks = [Block((member,), 1, max(n, 1)) for member, n in enumerate(cohort.sizes)]
        return run_blocks(program, message, cohort, Plan(blocks))

    return run


def run_eagerly(run: Run) -> Run:
    """`run` step by step; ends at the first value that is not finite."""

    def run_watched(shared: Shared, lanes: Lanes) -> Outcome:
        steps = 0

        def see(number: int, values: dict[str, Any]) -> None:
            nonlocal steps
            steps += 1
            bad = not_finite(values)
            if bad:
                raise FloatingPointError(bad)

        try:
            with jax.disable_jit(), watched_by(see):
                return run(shared, jax.tree.map(jnp.asarray, lanes))
        except Exception as error:
            raise ClientError(f"step {steps}: {line(error)}") from error

    return run_watched
