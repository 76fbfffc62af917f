"""FedPA on Flower: the same rounds, with clients on other machines.

Flower carries messages between a SuperLink and SuperNodes, over TLS or in its simulation; all else
is what runs elsewhere: a node runs its clients by the local engine, the server runs `fedpa`'s round
loop, with its cohorts, checkpoints and rejections, over an engine that sends messages instead of
calling functions. Needs `fedpa[flower]`; see docs/deployment.md.

    from fedpa.flower import client_app, server_app

A node without JAX takes part by `fedpa.numpy_client` and `FedPA`, a strategy.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpa.flower.answering import client_app
    from fedpa.flower.engine import flower
    from fedpa.flower.serving import server_app
    from fedpa.flower.strategy import FedPA

_WHERE = {
    "FedPA": "strategy",
    "client_app": "answering",
    "flower": "engine",
    "server_app": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedpa.flower.version import check_version

    check_version()
    with _nothing_to_collect():
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


@contextmanager
def _nothing_to_collect() -> Iterator[None]:
    """What is imported stays: looking through it for garbage, then and later, is time lost.

    A fifth of a second of a node's process, which lives for one message.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if on:
            gc.enable()


__all__ = ["FedPA", "client_app", "flower", "server_app"]
