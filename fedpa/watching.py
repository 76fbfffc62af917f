"""Observe values while code runs eagerly: used by the debug engine inside a client update.

In compiled code there is no watcher, and `watch` does nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

Watcher = Callable[[int, dict[str, Any]], None]
"""(step, values by name) → nothing; it may raise."""

_watcher: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def watch(step: Any, **values: Any) -> None:
    """Show a step's values to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None and not isinstance(step, jax.core.Tracer):
        watcher(int(step), values)


def not_finite(values: dict[str, Any]) -> str | None:
    """Find the first value that is not finite: its name and the value."""
    for name, tree in values.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if isinstance(leaf, jax.core.Tracer):
                continue
            array = np.asarray(leaf)
            bad = np.argwhere(~np.isfinite(array))
            if len(bad):
                where = jax.tree_util.keystr(path) + (str(bad[0].tolist()) if array.ndim else "")
                return f"{name}{where} = {array[tuple(bad[0])]}"
    return None
