"""The local engine: one compiled program per phase and client-size bucket, clients in turn.

Clients are padded to a few capacities so that a program serves many sizes. Padding costs almost
nothing: the number of local steps is that of the real examples, and batches are gathered from them.
"""

from collections.abc import Callable
from typing import Any

import jax

from fedpa.algorithms.algorithm import ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, RoundResult, collect
from fedpa.objectives.client_data import client_data, num_rows
from fedpa.server.aggregation import Aggregation

SMALLEST_CAPACITY = 64


def capacity(n: int) -> int:
    """The bucket of a client with n examples: 64, 128, 256, …"""
    size = SMALLEST_CAPACITY
    while size < n:
        size *= 2
    return size


def local() -> Engine:
    """Build the engine. It keeps the programs it has compiled for as long as it lives."""
    programs: dict[ClientUpdate, Callable[..., Any]] = {}

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        if client not in programs:
            programs[client] = jax.jit(accumulating(client, aggregation), donate_argnums=0)
        return run_cohort(programs[client], client, aggregation, message, cohort)

    return run


def accumulating(client: ClientUpdate, aggregation: Aggregation) -> Callable[..., Any]:
    """One client's update and its addition to the running sum, as one program."""

    def step(total: Any, message: Message, data: Any, state: Any, key: Any) -> Any:
        out = client(message, data, state, key)
        total, accepted = aggregation.add(total, out.result, out.weight)
        return total, out.state, out.info, accepted

    return step


def run_cohort(
    program: Callable[..., Any],
    client: ClientUpdate,
    aggregation: Aggregation,
    message: Message,
    cohort: Cohort,
) -> RoundResult:
    """Run the cohort's clients in order through `program`."""
    total, infos, accepted, examples, states = None, [], [], [], {}
    for index, name in enumerate(cohort.ids):
        arrays = cohort.load(name)
        n = num_rows(arrays)
        data = client_data(arrays, capacity(n))
        key, state = cohort.keys[index], cohort.states[name]
        if total is None:
            out = jax.eval_shape(client, message, data, state, key)
            total = aggregation.init(out.result, out.weight)
        total, new_state, info, ok = program(total, message, data, state, key)
        infos.append(info)
        accepted.append(ok)
        examples.append(n)
        states[name] = new_state
    # One transfer at the end: until here the host runs ahead of the device.
    infos, accepted = jax.device_get((infos, accepted))
    return collect(aggregation.value(total), infos, accepted, examples, states)
