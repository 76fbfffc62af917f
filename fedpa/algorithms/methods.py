"""A method: an algorithm with all its settings, waiting for the objective, that says what it is."""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import optax

from fedpa.algorithms.fedopt import Algorithm
from fedpa.errors import FedpaError
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import total_weight

P = ParamSpec("P")
Method = Callable[[Objective], Algorithm]
"""An algorithm with all its settings, waiting for the objective."""


class About(NamedTuple):
    """What files and reports say of a method."""

    name: str
    """fedpa, mb-sgd."""
    arguments: Mapping[str, Any]
    """What the function that built it was given."""

    def settings(self) -> dict[str, Any]:
        """The plain values among the arguments, and in them, by name: rho, epochs.

        Of an optimizer, which is a pair of functions, the length of its first step for a gradient
        of 1 (`client_step`, `server_step`): the learning rate of SGD, and nearly that of Adam.
        """
        return _plain(self.arguments)


@dataclasses.dataclass(frozen=True)
class Described:
    """A method that says what it is."""

    build: Method
    about: About

    def __call__(self, objective: Objective) -> Algorithm:
        return self.build(objective)


@dataclasses.dataclass(frozen=True)
class OfPopulation:
    """A method that has yet to be told of all clients, not only those of a round."""

    weighting: str
    """By which weights q_i it counts them."""
    method: Callable[[float], Method]
    """Σ q_i over all clients → the method."""
    about: About | None = None

    def __call__(self, objective: Objective) -> Algorithm:
        raise FedpaError(
            "population is not known: give population=…, the sum of the weights of all clients"
        )


def describe(builder: Callable[P, Method]) -> Callable[P, Method]:
    """The function that builds a method, with a note of its name and arguments in the result."""
    signature = inspect.signature(builder)

    @functools.wraps(builder)
    def build(*args: P.args, **options: P.kwargs) -> Method:
        method = builder(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        about = About(builder.__name__.replace("_", "-"), bound.arguments)
        if isinstance(method, OfPopulation):
            return dataclasses.replace(method, about=about)
        return Described(method.build if isinstance(method, Described) else method, about)

    return build


def about(method: Any) -> About | None:
    """What a method says of itself; None of a function of the user's."""
    return method.about if isinstance(method, Described | OfPopulation) else None


def _plain(arguments: Mapping[str, Any], side: str = "") -> dict[str, Any]:
    """The settings among a builder's arguments."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, optax.GradientTransformation):
            found |= _first_step(f"{side}_step", value)
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            found = _plain(value._asdict(), "client" if name == "local" else name) | found
        elif isinstance(value, Described | OfPopulation) and value.about is not None:
            found = {**value.about.settings(), name: value.about.name} | found
        elif name == "optimizer" and isinstance(value, int | float):
            found[f"{side}_step"] = value
        elif isinstance(value, np.generic):
            found.setdefault(name, value.item())
        elif isinstance(value, bool | int | float | str):
            found.setdefault(name, value)
    return found


def _first_step(name: str, optimizer: optax.GradientTransformation) -> dict[str, float]:
    """Nothing of an optimizer that must be given more than a gradient."""
    theta = np.zeros(1, np.float32)
    with contextlib.suppress(Exception):
        step, _ = optimizer.update(theta + 1, optimizer.init(theta), theta)
        length = float(np.abs(np.asarray(step))[0])
        return {name: float(f"{length:.6g}")} if math.isfinite(length) else {}
    return {}


def of_population(method: Method, sizes: Iterable[int]) -> Method:
    """The method, told how many examples each of all clients has."""
    if not isinstance(method, OfPopulation):
        return method
    return method.method(total_weight(method.weighting, sizes))
