"""What the engines of one device share: choose blocks, run them, keep what was compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import WASTE, blocks, capacities, ladder
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.execution import run_blocks, usual_kind
from fedpa.engines.memory import DoesNotFit, check_fits
from fedpa.engines.options import EngineOptions, check_options, chosen_devices
from fedpa.engines.program import Lanes, Program, bytes_of_result, compiled
from fedpa.objectives.client_data import ClientData, Kind, Resident
from fedpa.server.aggregation import Aggregation


class Width(NamedTuple):
    lanes: int
    """Clients side by side in a program."""
    workers: int
    """Programs at a time."""


def one_device(options: EngineOptions, choose: Callable[[Message, Cohort], Width]) -> Engine:
    """Build an engine. It keeps the programs it has compiled for as long as it lives.

    choose: (message, cohort) → how wide to run it; what `options` say wins.
    """
    check_options(options)
    device = next(d for d in chosen_devices(options) if d.process_index == jax.process_index())
    programs: dict[tuple[ClientUpdate, Aggregation], Program] = {}
    narrower: dict[ClientUpdate, Width] = {}
    prepared: set[ClientUpdate] = set()
    kinds: dict[Callable[[str], Any], Kind] = {}
    at_a_time: dict[ClientUpdate, int] = {}
    homes: dict[Callable[[str], Any], Any] = {}
    like: dict[ClientUpdate, Lanes] = {}
    sent: dict[ClientUpdate, int] = {}

    def width(client: ClientUpdate, message: Message, cohort: Cohort) -> Width:
        lanes, workers = narrower.get(client) or choose(message, cohort)
        return Width(options.clients_in_flight or lanes, options.workers or workers)

    def settled(cohort: Cohort) -> Any:
        """The cohort's examples on the device, if they are packed; moved there once."""
        pack = cohort.packed
        if pack is None or pack.load != cohort.load:
            return None
        places = [pack.position.get(name, -1) for name in cohort.ids]
        if -1 in places or pack.sizes[places].tolist() != list(cohort.sizes):
            return None  # somebody says otherwise
        if pack.load not in homes:
            homes.clear()  # of another federation
            arrays = [jnp.asarray(array) for array in pack.arrays]
            homes[pack.load] = jax.tree.unflatten(pack.structure, arrays)
        return homes[pack.load]

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        chosen = width(client, message, cohort)
        key = (client, aggregation)

        at_a_time[client] = chosen.workers

        def check(size: int, lanes: int) -> None:
            check_fits(size, lanes, at_a_time[client], device)

        if key not in programs:
            programs[key] = compiled(client, aggregation, check)
        program = programs[key]

        def bytes_up(lanes: Lanes) -> int:
            if client not in sent:
                like[client] = lanes
                sent[client] = bytes_of_result(client, message, lanes)
            return sent[client]

        known = capacities(cohort.population or cohort.sizes)
        widths = ladder(chosen.lanes)
        made = blocks(cohort.sizes, widths, known)
        try:
            with on_device(device, options):
                if cohort.load not in kinds:
                    kinds.clear()  # of other federations
                    kinds[cohort.load] = usual_kind(cohort)
                result = run_blocks(
                    program,
                    message,
                    cohort,
                    made,
                    chosen.workers,
                    kinds[cohort.load],
                    bytes_up,
                    settled(cohort),
                )
                if client not in prepared:
                    prepared.add(client)
                    prepare(program, message, like.pop(client), cohort.population, known, widths)
        except DoesNotFit:
            if options.clients_in_flight or options.workers or chosen == Width(1, 1):
                raise
            narrower[client] = Width(max(chosen.lanes // 2, 1), 1)
            return run(client, aggregation, message, cohort)
        return result

    run.__qualname__ = choose.__module__.rpartition(".")[2]  # as configurations name the engine
    return run


@contextlib.contextmanager
def on_device(device: jax.Device, options: EngineOptions) -> Iterator[None]:
    precision = None if options.matmul_precision == "default" else options.matmul_precision
    with contextlib.ExitStack() as stack:
        if options.device is not None:
            stack.enter_context(jax.default_device(device))
        if precision is not None:
            stack.enter_context(jax.default_matmul_precision(precision))
        yield


def prepare(
    program: Program,
    message: Message,
    like: Lanes,
    population: Sequence[int],
    known: Sequence[int],
    widths: Sequence[int],
) -> None:
    """Compile for every shape that later cohorts may need, so that no later round has to wait.

    like: lanes of any width and capacity.
    """
    if not population or min(population) >= (1 - WASTE) * max(population):
        return  # all alike: the first round has had every shape

    def shaped(x: Any, *leading: int) -> Any:
        shape = (*leading, *x.shape[len(leading) :])
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype))

    def data_of(lanes: int, rows: int) -> ClientData | Resident:
        data = like.data
        if isinstance(data, Resident):
            start, n = shaped(data.start, lanes), shaped(data.n, lanes)
            return dataclasses.replace(data, start=start, n=n, capacity=rows)
        return ClientData(
            jax.tree.map(lambda x: shaped(x, lanes, rows), data.examples), shaped(data.n, lanes)
        )

    for lanes in widths:
        states, keys = jax.tree.map(lambda x: shaped(x, lanes), (like.states, like.keys))
        for rows in known:
            program.prepare(message, Lanes(data_of(lanes, rows), states, keys))
