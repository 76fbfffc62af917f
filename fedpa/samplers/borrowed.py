"""blackjax, imported when it is first needed.

Importing it takes a third of a second and starts JAX's devices, which must not happen before
several processes have met (`fedpa.engines.distributed`).
"""

import importlib
from typing import Any

import jax


def blackjax(module: str) -> Any:
    """The module of this name below `blackjax`."""
    with jax.ensure_compile_time_eval():  # its constants must be numbers, wherever it is imported
        return importlib.import_module(f"blackjax.{module}")
