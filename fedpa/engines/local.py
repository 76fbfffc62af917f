"""The engines of one device: blocks of clients, each block one compiled program, its loops inside.

They are one engine with different widths:

- `per_client`: one client after the other. For large models, whose matrix products keep several
  cores busy.
- `vectorized`: many clients in one vectorized program. For small models, whose single operations
  are too short to use a core well.
- `local`, the default: whichever suits model and cohort; over several devices, `sharded`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedpa.algorithms.fedopt import ClientUpdate, Message
from fedpa.engines.blocks import Width, choose_width, one_at_a_time, side_by_side
from fedpa.engines.engine import Cohort, Engine
from fedpa.engines.execution import build_engine, find_kind
from fedpa.engines.machine import check_fits, choose_devices
from fedpa.engines.options import EngineOptions
from fedpa.engines.program import Program, compile_client
from fedpa.engines.sharded import sharded
from fedpa.objectives.client_data import Kind
from fedpa.server.aggregation import Aggregation


def local(options: EngineOptions = EngineOptions()) -> Engine:
    """Build the default engine: clients run on this machine as suits model, clients and devices.

    Args:
        options: How the machine is used; default: the engine chooses.
    Returns:
        The engine, for `fedpa.fit(..., engine=…)`.
    Raises:
        FedpaError: This machine can't serve the options.
    Example:
        >>> engine = fedpa.engines.local(fedpa.engines.EngineOptions(workers=1))
        >>> engine.__qualname__
        'local'
    """
    if len(choose_devices(options)) > 1:
        return sharded(options)
    return _one_device("local", options, choose_width)


def per_client(options: EngineOptions = EngineOptions()) -> Engine:
    """Build the engine that runs one client after the other; with very many cores, several.

    For large models, whose matrix products keep several cores busy.

    Args:
        options: How the machine is used; default: the engine chooses.
    Returns:
        The engine, for `fedpa.fit(..., engine=…)`.
    Example:
        >>> fedpa.engines.per_client().__qualname__
        'per_client'
    """
    return _one_device("per_client", options, one_at_a_time)


def vectorized(options: EngineOptions = EngineOptions()) -> Engine:
    """Build the engine that runs many clients vectorized in one program.

    For small models. On a CPU as many blocks of clients run at a time as there are cores.

    Args:
        options: How the machine is used; default: the engine chooses.
    Returns:
        The engine, for `fedpa.fit(..., engine=…)`.
    Example:
        >>> engine = vectorized(EngineOptions(clients_in_flight=4))
        >>> engine.__qualname__
        'vectorized'
    """
    return _one_device("vectorized", options, side_by_side)


def _one_device(
    name: str, options: EngineOptions, choose: Callable[[Message, Cohort], Width]
) -> Engine:
    device = next(d for d in choose_devices(options) if d.process_index == jax.process_index())
    # Of the federation seen last, by how its clients are read.
    sources: dict[Callable[[str], Any], tuple[Kind | None, Any]] = {}

    def compile_for(client: ClientUpdate, aggregation: Aggregation, workers: int) -> Program:
        return compile_client(
            client,
            aggregation,
            lambda size, lanes: check_fits(size, lanes, workers, device),
            device,
        )

    def find_source(cohort: Cohort) -> tuple[Kind | None, Any]:
        """What clients' arrays are, or packed examples on the device; moved there once."""
        if cohort.load not in sources:
            sources.clear()
            pack = cohort.packed
            if pack is None or pack.load != cohort.load:
                sources[cohort.load] = find_kind(cohort), None
            else:
                arrays = [jnp.asarray(array) for array in pack.arrays]
                sources[cohort.load] = None, jax.tree.unflatten(pack.structure, arrays)
        return sources[cohort.load]

    engine = build_engine(options, device, choose, compile_for, find_source)
    engine.__qualname__ = name  # as runs record it
    return engine
