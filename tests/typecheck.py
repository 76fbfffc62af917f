"""Types and shapes are checked wherever a function of the package is called."""

from collections.abc import Callable
from typing import TypeVar

from beartype import BeartypeConf, beartype

F = TypeVar("F", bound=Callable)
check_all = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""An integer will do for a number, as for mypy."""


def check_outer(function: F) -> F:
    """Check functions of modules and classes.

    Functions inside of functions would be prepared again each time they are made, which takes a
    tenth of the suite's time; `make test-all` checks them, too.
    """
    return function if "<locals>" in function.__qualname__ else check_all(function)
