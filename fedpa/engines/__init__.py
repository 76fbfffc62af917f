"""Where clients run; the same client update runs in each engine."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.engines.debug import debug
    from fedpa.engines.engine import Cohort, Engine, RoundResult
    from fedpa.engines.local import local, per_client, vectorized
    from fedpa.engines.machine import configure
    from fedpa.engines.names import ENGINES
    from fedpa.engines.options import EngineOptions
    from fedpa.engines.sharded import sharded

make_lazy(
    __name__,
    {
        "fedpa.engines.debug": ("debug",),
        "fedpa.engines.engine": ("Cohort", "Engine", "RoundResult"),
        "fedpa.engines.local": ("local", "per_client", "vectorized"),
        "fedpa.engines.machine": ("configure",),
        "fedpa.engines.names": ("ENGINES",),
        "fedpa.engines.options": ("EngineOptions",),
        "fedpa.engines.sharded": ("sharded",),
    },
)

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
