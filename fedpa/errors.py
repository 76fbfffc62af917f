"""Bad input: errors a person can act on, and the checks that raise them.

Each error names the field, the value it had and what would be right.
"""

import difflib
import math
import re
import types
import typing
from collections.abc import Collection
from typing import Any, Literal

import numpy as np


class FedpaError(ValueError):
    """Bad input, found before any work starts. The message is one line."""


class DataError(FedpaError):
    """Data that can't be trusted: cut, corrupt, or of another kind. Names the file, and the client.

    Unlike a client that fails it ends a run: nobody should train on part of a broken file unaware.
    """


class BadValueError(DataError):
    """A value of a client's data that can't be used. It is quoted: a node does not send this."""


class TooFewClientsError(FedpaError):
    """Fewer of a round's clients succeeded than a run asks for."""


class NoUsableClientError(TooFewClientsError):
    """No round so far had a usable client update: the model is what it was before the first."""


def refuse(field: str, value: object, expected: str) -> FedpaError:
    """The error for `field` having `value` where `expected` describes what would be right."""
    shown = re.sub(r"\s*\n\s*", " ", repr(value))  # an array's may have several lines
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return FedpaError(f"{field} = {shown}: {expected}")


def explain(error: OSError) -> str:
    """Why the system could not do it. Libraries raise some OSErrors without `strerror`."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def check_integer(field: str, value: object, least: int) -> None:
    """Refuse what is not a whole number ≥ `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise refuse(field, value, f"must be a whole number, at least {least}")


def check_number(field: str, value: object, least: float = 0.0) -> None:
    """Refuse what is not a finite number ≥ `least`."""
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not known or not least <= value < math.inf or value == -math.inf:  # type: ignore[operator]
        bound = f" ≥ {least:g}" if math.isfinite(least) else ""
        raise refuse(field, value, f"must be a finite number{bound}")


def check_type(field: str, value: object, kind: type, example: str) -> None:
    """Refuse an object of another kind than the field takes."""
    if not isinstance(value, kind):
        raise refuse(field, value, f"must be a {kind.__name__}, for example {example}")


def convert_value(hint: Any, value: Any, field: str) -> Any:
    """Return a setting's value if it is of the type `hint`; an integer will do for a number.

    Args:
        hint: A field's annotation: a type, a Literal or a union of them.
        value: The value as a file or a table has it.
        field: What the error calls it.
    """
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    raise refuse(field, value, f"must be {describe_type(hint)}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def describe_type(hint: Any) -> str:
    """Say what values a field takes."""
    if _is_union(hint):
        parts = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return " or ".join(describe_type(part) for part in parts)
    if typing.get_origin(hint) is Literal:
        choices = ", ".join(repr(choice) for choice in typing.get_args(hint))
        return f"one of {choices}" if len(typing.get_args(hint)) > 1 else choices
    return {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[hint]


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
