"""Work in threads runs with the settings of the thread that handed it over."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax

A = TypeVar("A")
B = TypeVar("B")


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
