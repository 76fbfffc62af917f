"""FedPA on Flower: the same rounds, with clients on other machines.

Flower carries messages between a SuperLink and SuperNodes, over TLS or in its simulation; all else
is what runs elsewhere: a node runs its clients by the local engine, the server runs `fedpa`'s round
loop, with its cohorts, checkpoints and rejections, over an engine that sends messages instead of
calling functions. Needs `fedpa[flower]`; see docs/deployment.md.

    from fedpa.flower import client_app, make_node, make_run, server_app   # your problem and method
    from fedpa.experiments.flower import client_app, server_app    # tasks and methods by name

A node without JAX takes part by `fedpa.numpy_client` and `FedPA`, a strategy.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from fedpa.errors import FedpaError
from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.flower.client import client_app, make_node
    from fedpa.flower.server import Served, make_run, server_app
    from fedpa.flower.strategy import FedPA

KNOWN = "1.41"
"""The Flower this works with: its interfaces change from one minor version to the next."""


def check_version() -> None:
    """Refuse a Flower that is not installed, or of another version than was tested."""
    remedy = "pip install 'fedpa[flower]' installs it"
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise FedpaError(f"Flower is not installed: flwr {KNOWN} is needed; {remedy}") from None
    if found.split(".")[:2] != KNOWN.split("."):
        raise FedpaError(f"flwr = {found!r}: flwr {KNOWN} is needed; {remedy}")


make_lazy(
    __name__,
    {
        "fedpa.flower.client": ("client_app", "make_node"),
        "fedpa.flower.server": ("Served", "make_run", "server_app"),
        "fedpa.flower.strategy": ("FedPA",),
    },
    lambda module: check_version(),
)

__all__ = ["FedPA", "Served", "client_app", "make_node", "make_run", "server_app"]
