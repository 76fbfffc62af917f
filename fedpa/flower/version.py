"""Which Flower this works with. Its interfaces change from one minor version to the next."""

from importlib.metadata import PackageNotFoundError, version

from fedpa.errors import FedpaError

KNOWN = (1, 41)


def check_version() -> None:
    """Refuse a Flower that is not there, or another than was tested."""
    wanted = ".".join(map(str, KNOWN))
    remedy = "pip install 'fedpa[flower]' installs it"
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise FedpaError(f"Flower is not installed: flwr {wanted} is needed; {remedy}") from None
    if tuple(found.split(".")[:2]) != tuple(map(str, KNOWN)):
        raise FedpaError(f"flwr = {found!r}: flwr {wanted} is needed; {remedy}")
