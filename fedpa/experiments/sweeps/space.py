"""The search space: which values of which hyperparameters are tried.

As a file has it:

    [space]
    server_learning_rate = [0.1, 0.5, 1.0]                          # choices
    client_learning_rate = {low = 0.001, high = 0.1, log = true}    # an interval
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedpa.errors import FedpaError, convert_value, refuse, suggest
from fedpa.experiments.config import RunConfig, is_all_burn_in, resolve, table_of
from fedpa.experiments.hyperparameters import Hyperparameters

Kind = Literal["grid", "random", "tpe"]
"""The order in which values are tried."""
MOST_CHECKED = 3_000
"""Combinations that are checked one by one; of larger spaces each value is, with the others' first.
The paper's five grids together have as many."""


class Interval(NamedTuple):
    """All numbers from `low` to `high`, whole ones if the hyperparameter is."""

    low: float
    high: float
    log: bool = False
    """Drawn evenly in the logarithm."""


Choices = tuple[Any, ...]
Space = Mapping[str, Choices | Interval]
"""Field of `Hyperparameters` → what it may be."""
Params = dict[str, Any]
"""One point of a space."""

_HINTS = typing.get_type_hints(Hyperparameters)


def read_space(path: Path) -> Space:
    """A space from a file's table [space]."""
    values = table_of("space", path)
    others = [name for name in values if name != "space"]
    if others or not isinstance(values.get("space"), dict):
        found = f"found {', '.join(others)}" if others else "found nothing"
        raise FedpaError(f"space = {str(path)!r}: must hold one table, [space]; {found}")
    return parse_space(values["space"], f"{path} [space]")


def parse_space(table: Mapping[str, Any], where: str) -> Space:
    """A space from plain values; unknown fields and values of other types are refused."""
    if not table:
        raise FedpaError(f"{where} is empty: name at least one hyperparameter and its values")
    return order_space({name: _values(name, value, where) for name, value in table.items()})


def order_space(space: Space) -> Space:
    """In the order of `Hyperparameters`: trials don't depend on the order of lines in a file."""
    return {name: space[name] for name in _HINTS if name in space}


def _values(name: str, value: Any, where: str) -> Choices | Interval:
    if name not in _HINTS:
        raise FedpaError(f"{where}: {name} can't be swept: {_explain_fixed(name)}")
    field = f"{where}: {name}"
    if isinstance(value, Mapping):
        return _interval(name, value, field)
    if not isinstance(value, list | tuple):
        raise refuse(field, value, "must be a list of values, or {low = …, high = …}")
    if not value:
        raise refuse(field, list(value), "is empty: give at least one value")
    choices = tuple(convert_value(_HINTS[name], choice, field) for choice in value)
    for choice in choices:
        if choices.count(choice) > 1:
            raise refuse(field, list(value), f"has {choice!r} twice")
    return choices


def _explain_fixed(name: str) -> str:
    if name in {field.name for field in dataclasses.fields(RunConfig)}:
        return "it is the same for all trials; give it as an option"
    return suggest(name, _HINTS)


def _interval(name: str, table: Mapping[str, Any], field: str) -> Interval:
    for key in table:
        if key not in Interval._fields:
            raise FedpaError(f"{field}: unknown {key}: an interval has low, high and log")
    for key in ("low", "high"):
        if key not in table:
            raise refuse(field, dict(table), f"lacks {key}: {{low = 0.001, high = 0.1}}")
    if not is_number(name):
        raise refuse(field, dict(table), "is no number: give a list of values")
    low, high = (
        convert_value(_HINTS[name], table[key], f"{field}: {key}") for key in ("low", "high")
    )
    log = convert_value(bool, table.get("log", False), f"{field}: log")
    if any(isinstance(end, str) or not math.isfinite(end) for end in (low, high)) or low >= high:
        raise refuse(field, dict(table), "low must be below high, and both finite")
    if log and low <= 0:
        raise refuse(field, dict(table), "low must be above 0 for log = true")
    return Interval(low, high, log)


def is_number(name: str) -> bool:
    """Whether a hyperparameter can be anything between two numbers."""
    return bool({int, float} & {_HINTS[name], *typing.get_args(_HINTS[name])})


def is_whole(name: str) -> bool:
    """Whether it can be whole numbers only."""
    return float not in {_HINTS[name], *typing.get_args(_HINTS[name])}


def as_table(space: Space) -> dict[str, Any]:
    """The space as a file has it."""
    return {
        name: values._asdict() if isinstance(values, Interval) else list(values)
        for name, values in space.items()
    }


def size(space: Space) -> int | None:
    """How many points it has; None if they can't be counted."""
    if any(isinstance(values, Interval) for values in space.values()):
        return None
    return math.prod(len(values) for values in space.values())


def point(space: Space, index: int) -> Params:
    """The points of a space of choices in a fixed order, the last hyperparameter's changing first.

    Computed from the index: of a large grid none but those that are run are made.
    """
    places = np.unravel_index(index, [len(values) for values in space.values()])
    return {name: space[name][place] for name, place in zip(space, places, strict=True)}


def configure(base: RunConfig, params: Mapping[str, Any]) -> RunConfig:
    """The configuration of one point, resolved; refused if the method can't do it."""
    hyperparameters = dataclasses.replace(base.hyperparameters, **params)
    try:
        config = resolve(dataclasses.replace(base, hyperparameters=hyperparameters))
    except FedpaError as error:
        raise FedpaError(f"space: {describe_point(params)} can't be run: {error}") from None
    for name, value in params.items():
        taken = getattr(config.hyperparameters, name)
        if taken != value:
            raise refuse(f"space: {name}", value, f"method {base.method} takes {taken!r} always")
    if "burn_in_rounds" in params and is_all_burn_in(config):
        expected = f"none of the {config.rounds} rounds of {config.method} would sample: give fewer"
        raise refuse("burn_in_rounds", params["burn_in_rounds"], expected)
    return config


def first_point(space: Space) -> Params:
    """Of a list its first value, of an interval its lower end."""
    return {name: values[0] for name, values in space.items()}


def check_space(space: Space, base: RunConfig) -> None:
    """Refuse what the method refuses, before anything runs."""
    for params in _representative(space):
        configure(base, params)


def _representative(space: Space) -> Iterator[Params]:
    """Every combination, of intervals both ends; of very many each value once."""
    ends: dict[str, Choices] = {
        name: (values.low, values.high) if isinstance(values, Interval) else values
        for name, values in space.items()
    }
    if math.prod(map(len, ends.values())) <= MOST_CHECKED:
        for combination in itertools.product(*ends.values()):
            yield dict(zip(ends, combination, strict=True))
        return
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        yield from (first | {name: value} for value in values)


def trim_space(space: Space, base: RunConfig) -> Space:
    """A task's grid without what makes no sense for this method and number of rounds.

    (FedAvg[1] has one epoch; burn-in must leave rounds for sampling.) What a user wrote is checked
    instead, not trimmed.
    """
    trimmed = {
        name: tuple(value for value in values if _fits(base, {name: value}))
        for name, values in space.items()
    }
    return {name: values for name, values in trimmed.items() if values}


def _fits(base: RunConfig, params: Params) -> bool:
    try:
        configure(base, params)
    except FedpaError:
        return False
    return True


def describe_point(params: Mapping[str, Any]) -> str:
    """A point as a person reads it."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in params.items())


def format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
