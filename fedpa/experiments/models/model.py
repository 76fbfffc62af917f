"""What a benchmark's model is: how it begins, and how many numbers it has."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedpa.lazy import find_components
from fedpa.types import Key


class Model(NamedTuple):
    summary: str
    init: Callable[[Key], Any]
    """key → an equinox module at its benchmark's sizes."""
    parameters: int
    """How many numbers it has."""


def models() -> dict[str, Model]:
    """The benchmarks' models by name: what the files of this package define as MODEL."""
    return find_components("fedpa.experiments.models", "MODEL")
