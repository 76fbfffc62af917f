"""Programs in threads: each runs where it is called, with the settings of who handed it over."""

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax

A = TypeVar("A")
B = TypeVar("B")


def run_where_called() -> None:
    """Have a CPU run a program in the thread that calls it, not in one of JAX's own.

    Those are few, and programs handed to them from several threads wait for each other. It takes
    effect only before JAX has started its devices, and yields to the user's own setting.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def with_settings_of_this_thread(work: Callable[[A], B]) -> Callable[[A], B]:
    """`work`, with the settings that hold here and now, whichever thread calls it."""
    config: Any = jax.config
    x64 = config.jax_enable_x64
    device = config.jax_default_device
    precision = config.jax_default_matmul_precision

    def scoped(argument: A) -> B:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(x64))
            stack.enter_context(jax.default_device(device))
            stack.enter_context(jax.default_matmul_precision(precision))
            return work(argument)

    return scoped
