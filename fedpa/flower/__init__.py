"""FedPA on Flower: the same rounds, with clients on other machines.

Flower carries messages between a SuperLink and SuperNodes, over TLS or in its simulation; all else
is what runs elsewhere: a node runs its clients by the local engine, the server runs `fedpa`'s round
loop, with its cohorts, checkpoints and rejections, over an engine that sends messages instead of
calling functions. Needs `fedpa[flower]`; see docs/deployment.md.

    from fedpa.flower import client_app, make_node, server_app     # a problem and a method of yours
    from fedpa.experiments.flower import client_app, server_app    # tasks and methods by name

A node without JAX takes part by `fedpa.numpy_client` and `FedPA`, a strategy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpa.flower.answering import client_app
    from fedpa.flower.engine import flower
    from fedpa.flower.node import make_node
    from fedpa.flower.serving import Served, server_app
    from fedpa.flower.strategy import FedPA

_WHERE = {
    "FedPA": "strategy",
    "Served": "serving",
    "client_app": "answering",
    "flower": "engine",
    "make_node": "node",
    "server_app": "serving",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedpa.flower.version import check_version

    check_version()
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


__all__ = ["FedPA", "Served", "client_app", "flower", "make_node", "server_app"]
