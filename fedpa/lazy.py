"""Packages whose names are imported on first use, and components that are found by their file.

A node that trains with another library (`fedpa.numpy_client`) has no JAX, and `--help` does not
import it.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any


def make_lazy(
    package: str,
    names: Mapping[str, Sequence[str]],
    check: Callable[[str], None] = lambda module: None,
) -> None:
    """Give a package public names that are imported on first use, as are its submodules.

    Args:
        package: The package's `__name__`.
        names: Module → its names that the package exports.
        check: Called with the module before it is imported; may raise.
    """
    module = sys.modules[package]
    module.__dict__["_homes"] = {name: home for home, here in names.items() for name in here}
    module.__dict__["_check"] = check
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    _homes: dict[str, str]
    _check: Callable[[str], None]

    def __getattr__(self, name: str) -> Any:
        if name in self._homes:
            self._check(self._homes[name])
            value = getattr(importlib.import_module(self._homes[name]), name)
        else:
            try:
                value = importlib.import_module(f"{self.__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{self.__name__}.{name}":
                    raise
                raise AttributeError(
                    f"module {self.__name__!r} has no attribute {name!r}"
                ) from None
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule binds it here, but must not replace a function of the same name
        # (`fedpa.deltas.mean`).
        if not (isinstance(value, ModuleType) and name in self._homes):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def find_components(package: str, attribute: str) -> dict[str, Any]:
    """Collect the objects that a package's files define under one name, by file name with dashes.

    To add a component, add a file; no other file changes.
    """
    components = {}
    path = importlib.import_module(package).__path__
    for name in sorted(info.name for info in pkgutil.iter_modules(path)):
        module = vars(importlib.import_module(f"{package}.{name}"))
        if attribute in module:
            components[name.replace("_", "-")] = module[attribute]
    return components
