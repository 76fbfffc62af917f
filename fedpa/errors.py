"""Errors for invalid input, and the checks that raise them.

Each message names the field, its value and what is expected.
"""

import contextlib
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Collection
from typing import Any, Literal

import numpy as np


class FedpaError(ValueError):
    """Invalid input, found before any work starts. The message is one line: field, value, remedy.

    Names and values may come from files and other machines: what can't be printed is escaped.

    Args:
        text: The message; default: none.

    Example:
        >>> fedpa.deltas.fixed(-0.1)
        Traceback (most recent call last):
        fedpa.errors.FedpaError: rho = -0.1: ...
    """

    def __init__(self, text: object = "") -> None:
        super().__init__(escape_unprintable(str(text)))


class DataError(FedpaError):
    """Data that can't be used: truncated, corrupt or of another format. Names file and client.

    Unlike a failing client it ends a run: training does not continue on part of a damaged file.

    Example:
        >>> fedpa.data.readers.open_npz("nowhere")
        Traceback (most recent call last):
        fedpa.errors.DataError: nowhere ...
    """


class BadValueError(DataError):
    """A value of a client's data that can't be used. The message quotes it: nodes do not send it.

    Example:
        >>> fedpa.objectives.client_data({"x": np.array([1.0, np.nan])})
        Traceback (most recent call last):
        fedpa.errors.BadValueError: examples: x[1] = nan: ...
    """


class TooFewClientsError(FedpaError):
    """Fewer of a round's clients succeeded than a run asks for (`min_success` of `fedpa.fit`).

    Example:
        >>> issubclass(TooFewClientsError, FedpaError)
        True
    """


class NoUsableClientError(TooFewClientsError):
    """No round so far had a usable client update, so the model is unchanged.

    Example:
        >>> issubclass(NoUsableClientError, TooFewClientsError)
        True
    """


def escape_unprintable(text: str) -> str:
    r"""Escape line breaks, terminal codes and other invisible characters, as Python writes them.

    Args:
        text: The text.
    Returns:
        One line that can be printed.
    Example:
        >>> escape_unprintable("lost\n\x1b[2J")
        'lost\\n\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def refuse(field: str, value: object, expected: str) -> FedpaError:
    """Make the error `field = value: expected`, on one line.

    Args:
        field: The name as the user knows it.
        value: The given value; its `repr` is shortened to 80 characters, or 240 for strings, so
            that paths are shown whole.
        expected: What is expected.
    Returns:
        The error, to be raised.
    Example:
        >>> print(refuse("rho", -1, "must be a number ≥ 0"))
        rho = -1: must be a number ≥ 0
    """
    shown = re.sub(r"\s*\n\s*", " ", repr(value))  # the repr of an array may have several lines
    most = 240 if isinstance(value, str) else 80
    if len(shown) > most:
        shown = shown[: most - 3] + "..."
    return FedpaError(f"{field} = {shown}: {expected}")


def explain(error: OSError) -> str:
    """Format the reason of an OSError. Libraries raise some without `strerror`.

    Args:
        error: The error.
    Returns:
        Its reason, on one line.
    Example:
        >>> explain(FileNotFoundError(2, "No such file or directory"))
        'No such file or directory'
    """
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def check_integer(field: str, value: object, least: int) -> None:
    """Refuse a value that is not a whole number ≥ `least`.

    Args:
        field: Its name in the error.
        value: The given value.
        least: The smallest valid value.
    Raises:
        FedpaError: The value is invalid.
    Example:
        >>> check_integer("rounds", 10, 1)
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise refuse(field, value, f"must be a whole number, at least {least}")


def check_positive(field: str, value: object) -> None:
    """Refuse a value that is not a finite number > 0.

    Args:
        field: Its name in the error.
        value: The given value.
    Raises:
        FedpaError: The value is invalid.
    Example:
        >>> check_positive("temperature", 0.5)
    """
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise refuse(field, value, "must be a finite number > 0")


def check_number(field: str, value: object, least: float = 0.0) -> None:
    """Refuse a value that is not a finite number ≥ `least`.

    Args:
        field: Its name in the error.
        value: The given value.
        least: The smallest valid value, -inf for any; default: 0.
    Raises:
        FedpaError: The value is invalid.
    Example:
        >>> check_number("rho", 0.1)
    """
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not known or not least <= value < math.inf or value == -math.inf:  # type: ignore[operator]
        bound = f" ≥ {least:g}" if math.isfinite(least) else ""
        raise refuse(field, value, f"must be a finite number{bound}")


def check_type(field: str, value: object, kind: type, example: str) -> None:
    """Refuse an object of another type than the field takes.

    Args:
        field: Its name in the error.
        value: The given value.
        kind: The expected type.
        example: An expression that makes one.
    Raises:
        FedpaError: It is not of this type.
    Example:
        >>> check_type("server", 0.1, str, "'adam'")
        Traceback (most recent call last):
        fedpa.errors.FedpaError: server = 0.1: must be a str, for example 'adam'
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise refuse(field, value, f"must be {article} {kind.__name__}, for example {example}")


def check_takes(field: str, function: object, arguments: str) -> None:
    """Refuse a value that is not a function of these arguments.

    Args:
        field: Its name in the error.
        function: The given value.
        arguments: The arguments of the call: `(params, batch, key)`.
    Raises:
        FedpaError: It can't be called with them.
    Example:
        >>> check_takes("loss", lambda params, batch: 0.0, "(params, batch, key)")
        Traceback (most recent call last):
        fedpa.errors.FedpaError: loss = <function <lambda> at ...>: ...
    """
    refusal = refuse(field, function, f"must be a function of {arguments}")
    if not callable(function):
        raise refusal
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions not written in Python have no signature
        return
    try:
        signature.bind(*arguments.split(","))
    except TypeError:
        raise refusal from None


def convert_value(hint: Any, value: Any, field: str) -> Any:
    """Return a setting's value if it has the type `hint`; integers are accepted for numbers.

    Args:
        hint: A field's annotation: a type, a Literal or a union of them.
        value: The value from a file or a table.
        field: Its name in the error.
    Returns:
        The value; a float if an integer was given for a number.
    Raises:
        FedpaError: It has another type.
    Example:
        >>> convert_value(float | Literal["oas"], 1, "rho")
        1.0
    """
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return value
        elif option is float and type(value) in (int, float):
            with contextlib.suppress(OverflowError):  # an integer that is no float
                return float(value)
        elif type(value) is option:
            return value
    raise refuse_type(field, value, hint)


def refuse_type(field: str, value: object, hint: Any) -> FedpaError:
    """Make the error for a value of a wrong type; suggests the closest choice.

    Args:
        field: Its name in the error.
        value: The given value.
        hint: The field's annotation: a type, a Literal or a union of them.
    Returns:
        The error, to be raised.
    Example:
        >>> print(refuse_type("optimizer", "adma", Literal["sgd", "adam"]))
        optimizer = 'adma': must be one of 'sgd', 'adam'; did you mean adam?
    """
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    choices = [c for o in options if typing.get_origin(o) is Literal for c in typing.get_args(o)]
    question = ask_if_meant(value, choices) if isinstance(value, str) else ""
    return refuse(field, value, f"must be {describe_type(hint)}{question}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def describe_type(hint: Any) -> str:
    """Describe the values of a field.

    Args:
        hint: The field's annotation: a type, a Literal or a union of them.
    Returns:
        The description, as in errors.
    Example:
        >>> describe_type(float | Literal["oas", "rblw"])
        "a number or one of 'oas', 'rblw'"
    """
    if _is_union(hint):
        parts = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return " or ".join(describe_type(part) for part in parts)
    if typing.get_origin(hint) is Literal:
        choices = ", ".join(repr(choice) for choice in typing.get_args(hint))
        return f"one of {choices}" if len(typing.get_args(hint)) > 1 else choices
    return {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}[hint]


def match_name(name: str, known: Collection[str]) -> str | None:
    """Match a name, ignoring case, hyphens and underscores.

    Args:
        name: The name as typed.
        known: The known names.
    Returns:
        The matching name of `known`, or None.
    Example:
        >>> match_name("MimeLite", ["mime", "mime-lite"])
        'mime-lite'
    """
    if name in known:
        return name
    return next((other for other in known if _fold(other) == _fold(name)), None)


def find_name(field: str, name: str, known: Collection[str], kind: str = "") -> str:
    """Match a name as `match_name` does; refuse an unknown one.

    Args:
        field: Its name in the error.
        name: The name as typed.
        known: The known names.
        kind: What the names are names of; default: `field`.
    Returns:
        The matching name of `known`.
    Raises:
        FedpaError: No name matches; the message suggests the closest.
    Example:
        >>> find_name("method", "fedpb", ["fedavg", "fedpa"])
        Traceback (most recent call last):
        fedpa.errors.FedpaError: method = 'fedpb': unknown method; did you mean fedpa?
    """
    found = match_name(name, known)
    if found is None:
        raise refuse(field, name, f"unknown {kind or field}; {suggest(name, known)}")
    return found


def suggest(name: str, known: Collection[str]) -> str:
    """Suggest the closest known name.

    Args:
        name: The name as typed.
        known: The known names.
    Returns:
        A question with the closest name; all of them if none is close.
    Example:
        >>> suggest("fedpb", ["fedavg", "fedpa"])
        'did you mean fedpa?'
    """
    return ask_if_meant(name, known)[2:] or f"choose from {', '.join(known)}"


def ask_if_meant(name: str, known: Collection[str]) -> str:
    """Suggest the closest known name, as the end of an error message.

    Args:
        name: The name as typed.
        known: The known names.
    Returns:
        The question, after a semicolon; nothing if no name is close, or it is known.
    Example:
        >>> ask_if_meant("FedPb", ["fedavg", "fedpa"])
        '; did you mean fedpa?'
    """
    spelled = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(name.casefold(), spelled, n=1, cutoff=0.7)
    return f"; did you mean {spelled[close[0]]}?" if close and name not in known else ""


def _fold(name: str) -> str:
    return name.replace("-", "").replace("_", "").casefold()
