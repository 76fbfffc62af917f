"""A client update made ready to run: one lane, or many side by side, and the sum of their results.

Clients are summed pairwise in a fixed order, so the sum does not depend on who finishes first.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from fedpa.algorithms.fedopt import ClientUpdate
from fedpa.engines.engine import num_bytes
from fedpa.objectives.client_data import ClientData, Resident, at_home
from fedpa.server.aggregation import Aggregate, Aggregation


class Lanes(NamedTuple):
    """What the clients of a block are given, stacked on axis 0."""

    data: ClientData | Resident
    states: Any
    keys: UInt32[Array, "lanes words"]
    """Raw key data: plain numbers travel between host, devices and processes."""


class Outcome(NamedTuple):
    """What a block gives back."""

    total: Any
    """The sum of its clients' results."""
    states: Any
    infos: Any
    accepted: Any


class Program(NamedTuple):
    step: Callable[[Any, Lanes], Outcome]
    """(message, lanes) → outcome."""
    prepare: Callable[[Any, Lanes], None]
    """Compile for lanes of such shapes."""
    merge: Callable[[Any, Any], Any]
    """Two sums into one; the first is given away."""
    value: Callable[[Any], Aggregate]
    """The sum's mean."""


def one_client(client: ClientUpdate, aggregation: Aggregation) -> Callable[..., Outcome]:
    """(message, data, state, raw key) → the outcome of a single client."""

    def step(message: Any, data: ClientData, state: Any, key: Any) -> Outcome:
        out = client(message, data, state, jax.random.wrap_key_data(key))
        return outcome(aggregation, out, state, data.n)

    return step


def outcome(aggregation: Aggregation, out: Any, state: Any, n: Any) -> Outcome:
    """A client's result as a sum of one. A client that is rejected keeps its old state.

    Lanes without a client have n = 0: whatever the update makes of that, it counts nothing.
    """
    weight = jax.tree.map(lambda q: jnp.where(n > 0, q, jnp.zeros_like(q)), out.weight)
    total, accepted = aggregation.add(aggregation.init(out.result, weight), out.result, weight)
    kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), out.state, state)
    return Outcome(total, kept, out.info, accepted)


def in_lanes(client: ClientUpdate, aggregation: Aggregation) -> Callable[[Any, Lanes], Outcome]:
    """(message, lanes) → outcome, traceable: lanes run side by side (or a single one as it is)."""
    single = one_client(client, aggregation)

    def step(message: Any, lanes: Lanes) -> Outcome:
        data = lanes.data
        if lanes.keys.shape[0] == 1:
            return single_lane(single(message, *only_lane(lanes)))
        if isinstance(data, Resident):
            arrays, rows = data.arrays, data.capacity

            def resident(start: Any, n: Any, state: Any, key: Any) -> Outcome:
                return single(message, at_home(arrays, start, n, rows), state, key)

            out = jax.vmap(resident)(data.start, data.n, lanes.states, lanes.keys)
        else:
            out = jax.vmap(single, in_axes=(None, 0, 0, 0))(message, *lanes)
        return out._replace(total=pairwise(aggregation, out.total))

    return step


def only_lane(lanes: Lanes) -> tuple[ClientData, Any, Any]:
    """Data, state and raw key of the single client of a block of one."""
    data = lanes.data
    if isinstance(data, Resident):
        data = at_home(data.arrays, data.start[0], data.n[0], data.capacity)
    else:
        data = jax.tree.map(lambda x: x[0], data)
    return data, jax.tree.map(lambda x: x[0], lanes.states), lanes.keys[0]


def pairwise(aggregation: Aggregation, totals: Any) -> Any:
    """Merge sums stacked on axis 0: halves onto halves until one is left."""
    width = jax.tree.leaves(totals)[0].shape[0]
    while width > 1:
        half = width // 2
        merged = jax.vmap(aggregation.merge)(
            jax.tree.map(lambda x: x[:half], totals),
            jax.tree.map(lambda x: x[half : 2 * half], totals),
        )
        left = jax.tree.map(lambda x: x[2 * half :], totals)
        totals = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), merged, left)
        width = half + width % 2
    return jax.tree.map(lambda x: x[0], totals)


class Ahead(NamedTuple):
    """A function of (message, lanes) that is compiled before it is called, once for each shape."""

    call: Callable[[Any, Lanes], Any]
    prepare: Callable[[Any, Lanes], None]
    """Compile for lanes of such shapes, which may be shapes alone; no-op if that was done."""


def ahead_of_time(
    step: Callable[[Any, Lanes], Any], check: Callable[[int, int], None], **shardings: Any
) -> Ahead:
    """`check(bytes, lanes)` is asked whether what was compiled may run."""
    executables: dict[Any, Any] = {}
    compiling = threading.Lock()
    jitted = jax.jit(step, **shardings)

    def executable(message: Any, lanes: Lanes) -> Any:
        leaves, structure = jax.tree.flatten((message, lanes))
        shapes = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in executables:
            with compiling:
                if shapes not in executables:
                    program: Any = jitted.lower(message, lanes).compile()
                    # The message and resident examples are there already, for all programs.
                    resident = lanes.data.arrays if isinstance(lanes.data, Resident) else ()
                    shared = num_bytes((message, resident))
                    check(bytes_of_program(program) - shared, lanes.keys.shape[0])
                    executables[shapes] = program
        return executables[shapes]

    return Ahead(
        lambda message, lanes: executable(message, lanes)(message, lanes),
        lambda message, lanes: executable(message, lanes) and None,
    )


def bytes_of_program(program: Any) -> int:
    """What a compiled program needs: its inputs, outputs and all between."""
    used = program.memory_analysis()
    if used is None:
        return 0
    return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes


def compiled(
    client: ClientUpdate,
    aggregation: Aggregation,
    check: Callable[[int, int], None] = lambda size, lanes: None,
) -> Program:
    """The program for one device. `check(bytes, lanes)` may refuse what would not fit."""
    whole = ahead_of_time(in_lanes(client, aggregation), check)
    return Program(
        whole.call,
        whole.prepare,
        jax.jit(aggregation.merge, donate_argnums=0),
        jax.jit(aggregation.value),
    )


def single_lane(out: Outcome) -> Outcome:
    """One client's outcome as that of a block of one lane."""
    rest = jax.tree.map(lambda x: jnp.asarray(x)[None], out._replace(total=()))
    return rest._replace(total=out.total)


def bytes_of_result(client: ClientUpdate, message: Any, lanes: Lanes) -> int:
    """What one client sends: the size of its result and weight."""

    def result(message: Any, lanes: Lanes) -> Any:
        data, state, key = only_lane(lanes)
        out = client(message, data, state, jax.random.wrap_key_data(key))
        return out.result, out.weight

    return num_bytes(jax.eval_shape(result, message, lanes))
