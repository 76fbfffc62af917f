"""Settings from files and tables: a value must be of the type that its field says."""

import types
import typing
from typing import Any, Literal

from fedpa.errors import refuse


def typed(hint: Any, value: Any, where: str) -> Any:
    """`value` if it is of the type `hint` says (an integer will do for a number)."""
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    raise refuse(where, value, f"must be {describe_type(hint)}")


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
