"""The debug engine: the same client update run eagerly, one client at a time, nothing compiled.

Slow; for stepping through a client update with a debugger or `print`. Something that goes wrong is
reported with the client, the step and the value.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import Block
from fedpa.engines.engine import (
    Cohort,
    Engine,
    EngineOptions,
    RoundResult,
    check_options,
    no_reports,
    record,
)
from fedpa.engines.execution import every_client_failed, find_kind, line, load_block, raw_keys
from fedpa.engines.program import bytes_of_result, run_lanes
from fedpa.server.aggregation import Aggregation
from fedpa.watching import not_finite, watched_by


def debug(options: EngineOptions = EngineOptions()) -> Engine:
    check_options(options)

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        run_client = run_lanes(client, aggregation)
        keys, reports, kind = raw_keys(cohort), no_reports(cohort), find_kind(cohort)
        total: Any = None
        failures: dict[str, str] = {}
        sent = 0
        for member, name in enumerate(cohort.ids):
            loaded = load_block(
                cohort, keys, Block((member,), 1, max(cohort.sizes[member], 1)), kind
            )
            failures |= loaded.failures
            if not loaded.lane_of:
                continue
            steps: list[int] = []
            try:
                with jax.disable_jit(), watched_by(lambda number, values: _see(steps, values)):
                    out = run_client(message, jax.tree.map(jnp.asarray, loaded.lanes))
                total = out.total if total is None else aggregation.merge(total, out.total)
            except Exception as error:
                failures[name] = f"step {len(steps)}: {line(error)}"
                continue
            sent = sent or bytes_of_result(client, message, loaded.lanes)
            n = loaded.lanes.data.n
            record(reports, cohort, loaded.lane_of, out.infos, out.accepted, n, out.states)
        if total is None:
            raise every_client_failed(failures)
        return RoundResult(aggregation.value(total), *reports, failures, sent)

    return run


def _see(steps: list[int], values: dict[str, Any]) -> None:
    steps.append(len(steps))
    bad = not_finite(values)
    if bad:
        raise FloatingPointError(bad)
