"""Every engine by its name."""

from collections.abc import Callable, Mapping

from fedpa.engines.debug import debug
from fedpa.engines.engine import Engine
from fedpa.engines.local import local, per_client, vectorized
from fedpa.engines.options import EngineOptions
from fedpa.engines.sharded import sharded

ENGINES: Mapping[str, Callable[[EngineOptions], Engine]] = {
    "debug": debug,
    "local": local,
    "per-client": per_client,
    "sharded": sharded,
    "vectorized": vectorized,
}
"""Every engine by name."""
