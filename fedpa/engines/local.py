"""The engines of one device: blocks of clients, each block one compiled program, its loops inside.

They differ in width alone:

- `per_client`: one client after the other. For large models, whose matrix products keep several
  cores busy.
- `vectorized`: many clients side by side. For small models, whose single operations are too short
  to be worth a core's while.
- `local`, the default: whichever suits model and cohort; over several devices, `sharded`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import (
    Width,
    blocks,
    capacities,
    choose_width,
    ladder,
    one_at_a_time,
    side_by_side,
)
from fedpa.engines.device_memory import DoesNotFit, check_fits
from fedpa.engines.engine import (
    Cohort,
    Engine,
    EngineOptions,
    RoundResult,
    check_options,
    choose_devices,
    use_device,
)
from fedpa.engines.execution import find_kind, run_blocks
from fedpa.engines.program import Program, bytes_of_result, compile_client, prepare_shapes
from fedpa.engines.sharded import sharded
from fedpa.objectives.client_data import Kind
from fedpa.server.aggregation import Aggregation


def local(options: EngineOptions = EngineOptions()) -> Engine:
    """Run clients on this machine in the way that suits model, clients and devices."""
    check_options(options)
    if len(choose_devices(options)) > 1:
        return sharded(options)
    return _one_device("local", options, choose_width)


def per_client(options: EngineOptions = EngineOptions()) -> Engine:
    """Run one client after the other; with very many cores, several at a time."""
    return _one_device("per_client", options, one_at_a_time)


def vectorized(options: EngineOptions = EngineOptions()) -> Engine:
    """Run clients side by side; on a CPU as many blocks of them at a time as there are cores."""
    return _one_device("vectorized", options, side_by_side)


def _one_device(
    name: str, options: EngineOptions, choose: Callable[[Message, Cohort], Width]
) -> Engine:
    """Build an engine. It keeps the programs it has compiled for as long as it lives.

    Args:
        name: As a run's settings name the engine.
        options: What is set there wins over the width chosen.
        choose: (message, cohort) → how wide to run it.
    """
    check_options(options)
    device = next(d for d in choose_devices(options) if d.process_index == jax.process_index())
    programs: dict[tuple[ClientUpdate, Aggregation], Program] = {}
    narrower: dict[ClientUpdate, Width] = {}
    workers: dict[ClientUpdate, int] = {}
    sent: dict[ClientUpdate, int] = {}
    # Of the federation seen last, by how its clients are read.
    kinds: dict[Callable[[str], Any], Kind] = {}
    resident: dict[Callable[[str], Any], Any] = {}

    def move_to_device(cohort: Cohort) -> Any:
        """The cohort's examples on the device, if they are packed; moved there once."""
        pack = cohort.packed
        if pack is None or pack.load != cohort.load:
            return None
        places = [pack.position.get(name, -1) for name in cohort.ids]
        if -1 in places or pack.sizes[places].tolist() != list(cohort.sizes):
            return None  # the cohort has other sizes than the packed copy
        if pack.load not in resident:
            resident.clear()
            arrays = [jnp.asarray(array) for array in pack.arrays]
            resident[pack.load] = jax.tree.unflatten(pack.structure, arrays)
        return resident[pack.load]

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        chosen = narrower.get(client) or choose(message, cohort)
        chosen = Width(options.clients_in_flight or chosen.lanes, options.workers or chosen.workers)
        workers[client] = chosen.workers
        key = (client, aggregation)
        if key not in programs:
            programs[key] = compile_client(
                client,
                aggregation,
                lambda size, lanes: check_fits(size, lanes, workers[client], device),
            )
        program = programs[key]
        known, widths = capacities(cohort.population or cohort.sizes), ladder(chosen.lanes)
        made = blocks(cohort.sizes, widths, known)
        try:
            with use_device(device, options):
                if cohort.load not in kinds:
                    kinds.clear()
                    kinds[cohort.load] = find_kind(cohort)
                result, lanes = run_blocks(
                    program,
                    message,
                    cohort,
                    made,
                    chosen.workers,
                    kinds[cohort.load],
                    move_to_device(cohort),
                )
                if client not in sent:
                    sent[client] = bytes_of_result(client, message, lanes)
                    prepare_shapes(program, message, lanes, cohort.population, known, widths)
        except DoesNotFit:
            if options.clients_in_flight or options.workers or chosen == Width(1, 1):
                raise
            narrower[client] = Width(max(chosen.lanes // 2, 1), 1)
            return run(client, aggregation, message, cohort)
        return result._replace(bytes_up=sent[client])

    run.__qualname__ = name
    return run
