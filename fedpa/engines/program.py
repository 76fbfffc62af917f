"""A client update as a compiled program: one lane or many, and the sum of their results.

Clients are summed pairwise in a fixed order, so the sum does not depend on which finishes first.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import WASTE, Plan
from fedpa.engines.engine import num_bytes
from fedpa.engines.machine import check_sum_fits
from fedpa.objectives.client_data import ClientData
from fedpa.server.aggregation import Aggregate, Aggregation, merge_pairwise, shape_of_sum


class Shared(NamedTuple):
    """What all lanes of all blocks read."""

    message: Message
    arrays: Any = None
    """The federation's packed examples, where they are on the device."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Clients whose examples are rows of the shared arrays."""

    start: Any
    """The first row of each client."""
    n: Any
    capacity: int = dataclasses.field(metadata={"static": True})
    """Rows that are read of each, n of them its own."""


class Lanes(NamedTuple):
    """Inputs of a block's clients, stacked on axis 0."""

    data: ClientData | Rows
    states: Any
    keys: UInt32[Array, "lanes words"]


class Outcome(NamedTuple):
    """The result of a block."""

    total: Any
    """The sum of its clients' results."""
    states: Any
    infos: Any
    accepted: Any


Run = Callable[[Shared, Lanes], Outcome]
Merge = Callable[[Any, Any], Any]
Check = Callable[[int, int], None]
"""(bytes of a program, its lanes) → refuse what does not fit."""


@dataclasses.dataclass
class Program:
    """A client update with its aggregation, as an engine runs it."""

    client: ClientUpdate
    find: Callable[[Shared, Lanes], Run]
    """Find the program for lanes of such shapes, which may be shapes alone; compiled if new."""
    merge: Merge
    """Two sums into one; the first is given away."""
    value: Callable[[Any], Aggregate]
    """The sum's mean."""
    check_sum: Callable[[Any, int], None] = lambda sent, clients: None
    """(shapes of what a client sends, clients) → refuse a sum that does not fit in memory."""
    bytes_up: int | None = None
    """What one client sends; None before the first round."""


def compile_client(
    client: ClientUpdate,
    aggregation: Aggregation,
    check: Check = lambda size, lanes: None,
    device: jax.Device | None = None,
) -> Program:
    """The program for one device; on the default one if none is given."""
    return Program(
        client,
        compile_ahead(run_lanes(client, aggregation), check),
        compile_merge(aggregation.merge),
        jax.jit(aggregation.value),
        functools.partial(check_sum, aggregation, device),
    )


def run_lanes(client: ClientUpdate, aggregation: Aggregation) -> Run:
    """(shared, lanes) → outcome, traceable: lanes run side by side (or a single one as it is)."""

    def run_one(shared: Shared, data: Any, state: Any, key: Any) -> Outcome:
        """A client's result as a sum of one. A client that is rejected keeps its old state."""
        data = read_client(shared, data)
        out = client(shared.message, data, state, jax.random.wrap_key_data(key))
        # Lanes without a client have n = 0; their result is not counted.
        weight = jax.tree.map(lambda q: jnp.where(data.n > 0, q, jnp.zeros_like(q)), out.weight)
        total, accepted = aggregation.add(aggregation.init(out.result, weight), out.result, weight)
        kept = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), out.state, state)
        return Outcome(total, kept, out.info, accepted)

    def run(shared: Shared, lanes: Lanes) -> Outcome:
        if lanes.keys.shape[0] == 1:
            out = run_one(shared, *jax.tree.map(lambda x: x[0], lanes))
            rest: Outcome = jax.tree.map(lambda x: jnp.asarray(x)[None], out._replace(total=()))
            return rest._replace(total=out.total)
        out = jax.vmap(run_one, in_axes=(None, 0, 0, 0))(shared, *lanes)
        return out._replace(total=merge_pairwise(aggregation, out.total))

    return run


def read_client(shared: Shared, data: ClientData | Rows) -> ClientData:
    """One client's data; rows of shared arrays are padded by repeating the last."""
    if isinstance(data, ClientData):
        return data
    offsets = jnp.arange(data.capacity, dtype=jnp.int32)
    rows = data.start + jnp.minimum(offsets, jnp.maximum(data.n - 1, 0))
    # An empty client at the very end begins where there is nothing.
    rows = jnp.minimum(rows, jax.tree.leaves(shared.arrays)[0].shape[0] - 1)
    return ClientData(jax.tree.map(lambda array: array[rows], shared.arrays), data.n)


def compile_merge(merge: Merge) -> Merge:
    """Compile `merge`; the first sum's memory becomes that of both, unless sums grow."""
    whole, growing = jax.jit(merge, donate_argnums=0), jax.jit(merge)
    grows: bool | None = None

    def run(one: Any, other: Any) -> Any:
        nonlocal grows
        if grows is None:
            both = jax.eval_shape(merge, one, other)
            grows = jax.tree.map(jnp.shape, both) != jax.tree.map(jnp.shape, one)
        return (growing if grows else whole)(one, other)

    return run


def compile_ahead(run: Run, check: Check, **shardings: Any) -> Callable[[Shared, Lanes], Run]:
    """`Program.find`: compile `run` before it is called, once for each shape."""
    executables: dict[Any, Run] = {}
    compiling = threading.Lock()
    jitted = jax.jit(run, **shardings)

    def find(shared: Shared, lanes: Lanes) -> Run:
        leaves, structure = jax.tree.flatten((shared, lanes))
        shapes = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in executables:
            with compiling:
                if shapes not in executables:
                    program: Any = jitted.lower(shared, lanes).compile()
                    used = program.memory_analysis()
                    if used is not None:
                        size = used.argument_size_in_bytes + used.output_size_in_bytes
                        size += used.temp_size_in_bytes
                        # Shared arrays are already in memory, for all programs.
                        check(size - num_bytes(shared), lanes.keys.shape[0])
                    executables[shapes] = program
        return executables[shapes]

    return find


def prepare_shapes(
    program: Program,
    shared: Shared,
    like: Lanes,
    population: Sequence[int],
    plan: Plan,
) -> None:
    """Compile for every shape that later cohorts may need, so that no later round has to wait.

    Args:
        program: What to compile.
        shared: As in the rounds.
        like: Lanes of any width and capacity.
        population: n_i of all clients that may come.
        plan: How cohorts are divided into blocks.
    """
    if not population or min(population) >= (1 - WASTE) * max(population):
        return  # all alike: the first round has had every shape

    def resize(x: Any, *leading: int) -> Any:
        shape = (*leading, *x.shape[len(leading) :])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    for lanes in plan.widths:
        data, states, keys = jax.tree.map(lambda x: resize(x, lanes), like)
        for rows in plan.capacities:
            if isinstance(data, Rows):
                data = dataclasses.replace(data, capacity=rows)
            else:
                data = ClientData(
                    jax.tree.map(lambda x: resize(x, lanes, rows), data.examples), data.n
                )
            program.find(shared, Lanes(data, states, keys))


def shape_of_result(client: ClientUpdate, shared: Shared, lanes: Lanes) -> Any:
    """What one client sends: the shapes of its result and weight."""

    def result(shared: Shared, lanes: Lanes) -> Any:
        data, state, key = jax.tree.map(lambda x: x[0], lanes)
        data = read_client(shared, data)
        out = client(shared.message, data, state, jax.random.wrap_key_data(key))
        return out.result, out.weight

    return jax.eval_shape(result, shared, lanes)


def bytes_of_sum(aggregation: Aggregation, sent: Any, clients: int) -> int:
    """The size of the sum of a number of clients that send this."""

    def add(result: Any, weight: Any) -> Any:
        return aggregation.add(aggregation.init(result, weight), result, weight)[0]

    return num_bytes(shape_of_sum(aggregation, jax.eval_shape(add, *sent), clients))


def check_sum(aggregation: Aggregation, device: jax.Device | None, sent: Any, clients: int) -> None:
    """Refuse an aggregation that keeps more results than fit in memory."""
    kept = bytes_of_sum(aggregation, sent, clients)
    if kept > bytes_of_sum(aggregation, sent, 1):
        check_sum_fits(kept, clients, jax.devices()[0] if device is None else device)
