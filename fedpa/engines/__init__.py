"""Where clients run; the same client update runs in each engine. One file each, found by name."""

from collections.abc import Callable

from fedpa.discovery import defined
from fedpa.engines.configuration import configure
from fedpa.engines.debug import debug
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import local
from fedpa.engines.options import EngineOptions
from fedpa.engines.per_client import per_client
from fedpa.engines.sharded import sharded
from fedpa.engines.vectorized import vectorized


def engines() -> dict[str, Callable[[EngineOptions], Engine]]:
    """Every engine by name: the files of this package that define `ENGINE`."""
    return defined("fedpa.engines", "ENGINE")


__all__ = [
    "Cohort",
    "Engine",
    "EngineOptions",
    "RoundResult",
    "configure",
    "debug",
    "engines",
    "local",
    "per_client",
    "sharded",
    "vectorized",
]
