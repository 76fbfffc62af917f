"""Components are found by being in their package: adding one touches no other file."""

import importlib
import pkgutil
from typing import Any


def defined(package: str, attribute: str) -> dict[str, Any]:
    """What the package's files define under this name, by the file's name with dashes."""
    found = {}
    path = importlib.import_module(package).__path__
    for name in sorted(info.name for info in pkgutil.iter_modules(path)):
        loaded = vars(importlib.import_module(f"{package}.{name}"))
        if attribute in loaded:
            found[name.replace("_", "-")] = loaded[attribute]
    return found
