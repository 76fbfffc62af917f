"""The local engine: one compiled program per phase and client-size bucket, clients in turn.

Clients are padded to a few capacities so that a program serves many sizes. Padding costs almost
nothing: the number of local steps is that of the real examples, and batches are gathered from them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.algorithms.algorithm import ClientState, ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, RoundResult, collect, num_bytes
from fedpa.objectives.client_data import client_data, num_rows
from fedpa.server.aggregation import Aggregate, Aggregation

SMALLEST_CAPACITY = 64


def capacity(n: int) -> int:
    """The bucket of a client with n examples: 64, 128, 256, …"""
    size = SMALLEST_CAPACITY
    while size < n:
        size *= 2
    return size


class Program(NamedTuple):
    """A client update made ready to run."""

    shapes: Callable[..., Any]
    """(message, data, state, key) → the shapes of the client's result."""
    empty: Callable[[Any], Any]
    """Those shapes → an empty sum."""
    step: Callable[..., Any]
    """(sum, message, data, state, key) → (sum, client state, info, accepted)."""
    value: Callable[[Any], Aggregate]
    """The sum's mean."""


def program(client: ClientUpdate, aggregation: Aggregation) -> Program:
    """One client's update and its addition to the running sum, as one function."""

    def step(total: Any, message: Any, data: Any, state: Any, key: Any) -> tuple[Any, ...]:
        out = client(message, data, state, key)
        total, accepted = aggregation.add(total, out.result, out.weight)
        # A rejected client's new state is no better than its result: it keeps the old one.
        kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), out.state, state)
        return total, kept, out.info, accepted

    known: list[Any] = []

    def shapes(*inputs: Any) -> Any:
        # The same for all clients, whatever their size: worked out once.
        if not known:
            known.append(jax.eval_shape(client, *inputs))
        return known[0]

    return Program(
        shapes, lambda out: aggregation.init(out.result, out.weight), step, aggregation.value
    )


def local() -> Engine:
    """Build the engine. It keeps the programs it has compiled for as long as it lives."""
    programs: dict[tuple[ClientUpdate, Aggregation], Program] = {}

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        key = (client, aggregation)
        if key not in programs:
            plain = program(client, aggregation)
            programs[key] = plain._replace(
                step=jax.jit(plain.step, donate_argnums=0), value=jax.jit(plain.value)
            )
        return run_cohort(programs[key], message, cohort)

    return run


def run_cohort(p: Program, message: Message, cohort: Cohort) -> RoundResult:
    """Run the cohort's clients, one after the other, in order."""
    total: Any = None
    shapes: Any = None
    infos, accepted, examples = [], [], []
    states: dict[str, ClientState] = {}
    for name, key in zip(cohort.ids, cohort.keys, strict=True):
        arrays = cohort.load(name)
        n = num_rows(arrays)
        inputs = (message, client_data(arrays, capacity(n)), cohort.states[name], key)
        if total is None:
            shapes = p.shapes(*inputs)
            total = p.empty(shapes)
        total, states[name], info, ok = p.step(total, *inputs)
        infos.append(info)
        accepted.append(ok)
        examples.append(n)
    # One transfer at the end: until here the host runs ahead of the device.
    infos, accepted = jax.device_get((infos, accepted))
    sent = num_bytes((shapes.result, shapes.weight))
    return collect(p.value(total), infos, accepted, examples, states, sent)


ENGINE = local
