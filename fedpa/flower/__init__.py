"""FedPA on Flower: the same rounds, with clients on other machines.

Flower transports messages between a SuperLink and SuperNodes, over TLS or in its simulation. A node
runs its clients with the local engine. The server runs `fedpa`'s round loop, with its cohorts,
checkpoints and rejections, on an engine that sends messages instead of calling functions.

Needs `fedpa[flower]`; see docs/deployment.md.

    from fedpa.flower import client_app, make_node, make_run, server_app   # your problem and method
    from fedpa.experiments.flower import client_app, server_app    # tasks and methods by name

Nodes without JAX use `fedpa.numpy_client` and the strategy `FedPA`.
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
"""The supported version of Flower, whose interfaces change between minor versions."""


def check_version() -> None:
    """Refuse a missing Flower, or another version than the tested one."""
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
