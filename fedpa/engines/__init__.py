"""Where clients run; the same client update runs in each engine."""

from collections.abc import Callable

from fedpa.engines.debug import debug
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import local

ENGINES: dict[str, Callable[[], Engine]] = {"local": local, "debug": debug}

__all__ = ["ENGINES", "Cohort", "Engine", "RoundResult", "debug", "local"]
