"""A client update made ready to run: one lane, or many side by side, and the sum of their results.

Clients are summed pairwise in a fixed order, so the sum does not depend on which finishes first.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from fedpa.algorithms.fedopt import ClientUpdate
from fedpa.engines.blocks import WASTE
from fedpa.engines.engine import num_bytes
from fedpa.engines.resident import Resident, lane_axes, map_lanes, read_client
from fedpa.objectives.client_data import ClientData
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


Run = Callable[[Any, Lanes], Outcome]
"""(message, lanes) → outcome."""
Check = Callable[[int, int], None]
"""(bytes of a program, its lanes) → refuse what does not fit."""


class Program(NamedTuple):
    run: Run
    prepare: Callable[[Any, Lanes], None]
    """Compile for lanes of such shapes, which may be shapes alone; no-op if that was done."""
    merge: Callable[[Any, Any], Any]
    """Two sums into one; the first is given away."""
    value: Callable[[Any], Aggregate]
    """The sum's mean."""


def compile_client(
    client: ClientUpdate, aggregation: Aggregation, check: Check = lambda size, lanes: None
) -> Program:
    """The program for one device."""
    return Program(
        *compile_ahead(run_lanes(client, aggregation), check),
        jax.jit(aggregation.merge, donate_argnums=0),
        jax.jit(aggregation.value),
    )


def run_lanes(client: ClientUpdate, aggregation: Aggregation) -> Run:
    """(message, lanes) → outcome, traceable: lanes run side by side (or a single one as it is)."""

    def run_one(message: Any, data: Any, state: Any, key: Any) -> Outcome:
        """A client's result as a sum of one. A client that is rejected keeps its old state."""
        data = read_client(data)
        out = client(message, data, state, jax.random.wrap_key_data(key))
        # Lanes without a client have n = 0: whatever the update makes of that, it counts nothing.
        weight = jax.tree.map(lambda q: jnp.where(data.n > 0, q, jnp.zeros_like(q)), out.weight)
        total, accepted = aggregation.add(aggregation.init(out.result, weight), out.result, weight)
        kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), out.state, state)
        return Outcome(total, kept, out.info, accepted)

    def run(message: Any, lanes: Lanes) -> Outcome:
        if lanes.keys.shape[0] == 1:
            out = run_one(message, *_only_lane(lanes))
            rest = jax.tree.map(lambda x: jnp.asarray(x)[None], out._replace(total=()))
            return rest._replace(total=out.total)
        axes = (None, lane_axes(lanes.data), 0, 0)
        out = jax.vmap(run_one, in_axes=axes)(message, *lanes)
        return out._replace(total=merge_pairwise(aggregation, out.total))

    return run


def _only_lane(lanes: Lanes) -> Lanes:
    """Data, state and raw key of the single client of a block of one."""

    def first(x: Any) -> Any:
        return x[0]

    return Lanes(map_lanes(first, lanes.data), jax.tree.map(first, lanes.states), lanes.keys[0])


def merge_pairwise(aggregation: Aggregation, totals: Any) -> Any:
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


def compile_ahead(
    run: Run, check: Check, **shardings: Any
) -> tuple[Run, Callable[[Any, Lanes], None]]:
    """A program's `run`, compiled before it is called, once for each shape; and its `prepare`."""
    executables: dict[Any, Any] = {}
    compiling = threading.Lock()
    jitted = jax.jit(run, **shardings)

    def find(message: Any, lanes: Lanes) -> Any:
        leaves, structure = jax.tree.flatten((message, lanes))
        shapes = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in executables:
            with compiling:
                if shapes not in executables:
                    program: Any = jitted.lower(message, lanes).compile()
                    # The message and resident examples are there already, for all programs.
                    resident = lanes.data.arrays if isinstance(lanes.data, Resident) else ()
                    shared = num_bytes((message, resident))
                    check(_bytes_of_program(program) - shared, lanes.keys.shape[0])
                    executables[shapes] = program
        return executables[shapes]

    return (
        lambda message, lanes: find(message, lanes)(message, lanes),
        lambda message, lanes: find(message, lanes) and None,
    )


def _bytes_of_program(program: Any) -> int:
    """What a compiled program needs: its inputs, outputs and all between."""
    used = program.memory_analysis()
    if used is None:
        return 0
    return used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes


def prepare_shapes(
    program: Program,
    message: Any,
    like: Lanes,
    population: Sequence[int],
    known: Sequence[int],
    widths: Sequence[int],
) -> None:
    """Compile for every shape that later cohorts may need, so that no later round has to wait.

    Args:
        like: Lanes of any width and capacity.
        population: n_i of all clients that may come.
        known: Their capacities.
        widths: Numbers of lanes.
    """
    if not population or min(population) >= (1 - WASTE) * max(population):
        return  # all alike: the first round has had every shape

    def resize(x: Any, *leading: int) -> Any:
        shape = (*leading, *x.shape[len(leading) :])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    def resize_data(data: ClientData | Resident, lanes: int, rows: int) -> ClientData | Resident:
        if isinstance(data, Resident):
            return dataclasses.replace(map_lanes(lambda x: resize(x, lanes), data), capacity=rows)
        examples = jax.tree.map(lambda x: resize(x, lanes, rows), data.examples)
        return ClientData(examples, resize(data.n, lanes))

    for lanes in widths:
        states, keys = jax.tree.map(lambda x: resize(x, lanes), (like.states, like.keys))
        for rows in known:
            program.prepare(message, Lanes(resize_data(like.data, lanes, rows), states, keys))


def bytes_of_result(client: ClientUpdate, message: Any, lanes: Lanes) -> int:
    """What one client sends: the size of its result and weight."""

    def result(message: Any, lanes: Lanes) -> Any:
        data, state, key = _only_lane(lanes)
        out = client(message, read_client(data), state, jax.random.wrap_key_data(key))
        return out.result, out.weight

    return num_bytes(jax.eval_shape(result, message, lanes))
