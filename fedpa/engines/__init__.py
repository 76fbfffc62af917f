"""Where clients run; the same client update runs in each engine."""

from collections.abc import Callable, Mapping

from fedpa.engines.debug import debug
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import local, per_client, vectorized
from fedpa.engines.machine import EngineOptions, configure
from fedpa.engines.sharded import sharded

ENGINES: Mapping[str, Callable[[EngineOptions], Engine]] = {
    "debug": debug,
    "local": local,
    "per-client": per_client,
    "sharded": sharded,
    "vectorized": vectorized,
}
"""Every engine by name."""

__all__ = [
    "ENGINES",
    "Cohort",
    "Engine",
    "EngineOptions",
    "RoundResult",
    "configure",
    "debug",
    "local",
    "per_client",
    "sharded",
    "vectorized",
]
