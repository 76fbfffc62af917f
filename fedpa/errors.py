"""Errors a person can act on: each names the field, the value it had and what would be right."""

import re

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


def check_number(field: str, value: object) -> None:
    """Refuse what is not a finite number ≥ 0."""
    known = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not known or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise refuse(field, value, "must be a finite number ≥ 0")


def check_type(field: str, value: object, kind: type, example: str) -> None:
    """Refuse an object of another kind than the field takes."""
    if not isinstance(value, kind):
        raise refuse(field, value, f"must be a {kind.__name__}, for example {example}")
