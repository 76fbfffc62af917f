"""Components are found by being in their package: adding one touches no other file."""

import difflib
import importlib
import pkgutil
from collections.abc import Collection
from typing import Any

from fedpa.errors import refuse


def defined(package: str, attribute: str) -> dict[str, Any]:
    """What the package's files define under this name, by the file's name with dashes."""
    found = {}
    path = importlib.import_module(package).__path__
    for name in sorted(info.name for info in pkgutil.iter_modules(path)):
        loaded = vars(importlib.import_module(f"{package}.{name}"))
        if attribute in loaded:
            found[name.replace("_", "-")] = loaded[attribute]
    return found


def match_name(name: str, known: Collection[str]) -> str | None:
    """Match a name whatever its case, hyphens and underscores; None if none is meant.

    Example:
        >>> match_name("MimeLite", ["mime", "mime-lite"])
        'mime-lite'
    """
    if name in known:
        return name
    return next((other for other in known if _fold(other) == _fold(name)), None)


def find_name(field: str, name: str, known: Collection[str], kind: str = "") -> str:
    """Match a name as `match_name` does; an unknown one is refused.

    Args:
        field: What the error calls it.
        name: The name as it was typed.
        known: The names there are.
        kind: What they are names of; default: `field`.
    Returns:
        The one of `known` that is meant.
    """
    found = match_name(name, known)
    if found is None:
        raise refuse(field, name, f"unknown {kind or field}; {suggest(name, known)}")
    return found


def suggest(name: str, known: Collection[str]) -> str:
    """Say which name may have been meant; all there are if none is close."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


def _fold(name: str) -> str:
    return name.replace("-", "").replace("_", "").casefold()
