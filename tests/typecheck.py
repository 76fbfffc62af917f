"""Types and shapes are checked wherever a function of the package is called.

Not where its users call it: exported functions check for themselves what they are given and answer
with an error a user can read, which is what tests must see (`tests/test_refusals.py`).
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from beartype import BeartypeConf, beartype

F = TypeVar("F", bound=Callable)
PACKAGE = Path(__file__).parents[1] / "fedpa"
# A whole number is a floating-point number, too, as type checkers have it (PEP 484).
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def _exported() -> set[str]:
    """The names in every package's `__all__`, read from its source: nothing is imported yet."""
    names: set[str] = set()
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names |= set(ast.literal_eval(node.value))
    return names


EXPORTED = _exported()


def check_all(function: F) -> F:
    """Check every function but those that users call, and those that check for them."""
    is_check = function.__name__.lstrip("_").startswith("check")
    name = function.__qualname__.removesuffix(".__init__")
    return function if is_check or name in EXPORTED else _check(function)


def check_outer(function: F) -> F:
    """Check functions of modules and classes.

    Functions inside of functions would be prepared again each time they are made, which takes a
    tenth of the suite's time; `make test-all` checks them, too.
    """
    return function if "<locals>" in function.__qualname__ else check_all(function)
