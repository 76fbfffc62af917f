"""Where clients run; the same client update runs in each engine. One file each, found by name."""

import importlib
import pkgutil
from collections.abc import Callable

from fedpa.engines.debug import debug
from fedpa.engines.engine import Cohort, Engine, RoundResult
from fedpa.engines.local import local


def engines() -> dict[str, Callable[[], Engine]]:
    """Every engine by name: the files of this package that define `ENGINE`."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in names}
    return {name: module.ENGINE for name, module in modules.items() if "ENGINE" in vars(module)}


__all__ = ["Cohort", "Engine", "RoundResult", "debug", "engines", "local"]
