"""Bad input: errors a person can act on, and the checks that raise them.

Each error names the field, the value it had and what would be right.
"""

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
    """Bad input, found before any work starts. The message is one line: field, value, what to do.

    Example:
        >>> fedpa.deltas.fixed(-0.1)
        Traceback (most recent call last):
        fedpa.errors.FedpaError: rho = -0.1: ...
    """


class DataError(FedpaError):
    """Data that can't be trusted: cut, corrupt, or of another kind. Names the file, and the client.

    Unlike a client that fails it ends a run: training does not continue on part of a broken file.

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
    """No round so far had a usable client update: the model is what it was before the first.

    Example:
        >>> issubclass(NoUsableClientError, TooFewClientsError)
        True
    """


def refuse(field: str, value: object, expected: str) -> FedpaError:
    """Make the error `field = value: expected`, on one line.

    Args:
        field: The name as the user knows it.
        value: What it was; shown by its `repr`, at most 80 characters of it, 240 of a text: a path
            must be seen whole.
        expected: What would be right.
    Returns:
        The error, to be raised.
    Example:
        >>> print(refuse("rho", -1, "must be a number ≥ 0"))
        rho = -1: must be a number ≥ 0
    """
    shown = re.sub(r"\s*\n\s*", " ", repr(value))  # an array's may have several lines
    most = 240 if isinstance(value, str) else 80
    if len(shown) > most:
        shown = shown[: most - 3] + "..."
    return FedpaError(f"{field} = {shown}: {expected}")


def explain(error: OSError) -> str:
    """Say why the system could not do it. Libraries raise some OSErrors without `strerror`.

    Args:
        error: The system's.
    Returns:
        Its reason, on one line.
    Example:
        >>> explain(FileNotFoundError(2, "No such file or directory"))
        'No such file or directory'
    """
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def check_integer(field: str, value: object, least: int) -> None:
    """Refuse what is not a whole number ≥ `least`.

    Args:
        field: What the error calls it.
        value: What was given.
        least: The smallest value that is right.
    Raises:
        FedpaError: It is not.
    Example:
        >>> check_integer("rounds", 10, 1)
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise refuse(field, value, f"must be a whole number, at least {least}")


def check_number(field: str, value: object, least: float = 0.0) -> None:
    """Refuse what is not a finite number ≥ `least`.

    Args:
        field: What the error calls it.
        value: What was given.
        least: The smallest value that is right, -inf for any; default: 0.
    Raises:
        FedpaError: It is not.
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
        field: What the error calls it.
        value: What was given.
        kind: The type that is right.
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
    """Refuse what is not a function that takes these arguments.

    Args:
        field: What the error calls it.
        function: What was given.
        arguments: What it will be called with: `(params, batch, key)`.
    Raises:
        FedpaError: It can't be called so.
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
    except (TypeError, ValueError):  # what is not written in Python does not tell
        return
    try:
        signature.bind(*arguments.split(","))
    except TypeError:
        raise refusal from None


def convert_value(hint: Any, value: Any, field: str) -> Any:
    """Return a setting's value if it is of the type `hint`; an integer will do for a number.

    Args:
        hint: A field's annotation: a type, a Literal or a union of them.
        value: The value as a file or a table has it.
        field: What the error calls it.
    Returns:
        The value; a float where an integer was given for a number.
    Raises:
        FedpaError: It is of another type.
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
            return float(value)
        elif type(value) is option:
            return value
    raise refuse_type(field, value, hint)


def refuse_type(field: str, value: object, hint: Any) -> FedpaError:
    """Make the error for a value that is not of a field's type; names a choice that is close.

    Args:
        field: What the error calls it.
        value: What was given.
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
    """Say what values a field takes.

    Args:
        hint: The field's annotation: a type, a Literal or a union of them.
    Returns:
        The description, as errors have it.
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
    """Match a name whatever its case, hyphens and underscores.

    Args:
        name: The name as it was typed.
        known: The names there are.
    Returns:
        The one of `known` that is meant; None if none is.
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
    Raises:
        FedpaError: None is; names the closest.
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
    """Say which name may have been meant.

    Args:
        name: The name as it was typed.
        known: The names there are.
    Returns:
        A question with the closest name; all of them if none is close.
    Example:
        >>> suggest("fedpb", ["fedavg", "fedpa"])
        'did you mean fedpa?'
    """
    return ask_if_meant(name, known)[2:] or f"choose from {', '.join(known)}"


def ask_if_meant(name: str, known: Collection[str]) -> str:
    """Ask, at the end of an error, for the known name that a mistyped one is close to.

    Args:
        name: The name as it was typed.
        known: The names there are.
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
