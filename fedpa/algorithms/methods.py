"""Methods: functions of the objective that return an algorithm, with name and settings."""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

import numpy as np
import optax

from fedpa.algorithms.fedopt import Algorithm
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import Aggregation, total_weight

P = ParamSpec("P")
Method = Callable[[Objective], Algorithm]
"""An algorithm with all its settings, waiting for the objective."""


@dataclasses.dataclass(frozen=True)
class Described:
    """A method with its name and its settings.

    Args:
        build: Objective → algorithm.
        builder: The function that built it: `fedpa.fedpa`.
        arguments: What that was given.
    Example:
        >>> import fedpa
        >>> local = fedpa.LocalTraining(0.1, batch_size=10)
        >>> method = fedpa.mb_sgd(local, fedpa.Server(fedpa.server.sgd(1.0)))
        >>> method.name
        'mb-sgd'
    """

    build: Method
    builder: Callable[..., Method]
    arguments: Mapping[str, Any]

    def __call__(self, objective: Objective) -> Algorithm:
        return self.build(objective)

    @property
    def name(self) -> str:
        """fedpa, mb-sgd."""
        return self.builder.__name__.replace("_", "-")

    @property
    def lacks_population(self) -> bool:
        """Whether it still needs Σ q_i over all clients."""
        return self.arguments.get("population", 0) is None

    def settings(self) -> dict[str, Any]:
        """The plain values among the arguments, and in them, by name: rho, epochs.

        Of an optimizer, which is a pair of functions, the length of its first step for a gradient
        of 1 (`client_step`, `server_step`): the learning rate of SGD, and nearly that of Adam.
        """
        return _plain(self.arguments)


def describe(builder: Callable[P, Method]) -> Callable[P, Described]:
    """Note a builder's name and arguments in the methods it builds.

    Args:
        builder: A function of settings that returns a method.
    Returns:
        The function, whose methods say what they are: in records, tables and `config.toml`.
    Example:
        >>> import fedpa
        >>> @fedpa.algorithms.describe
        ... def slow_start(local, server, *, rounds):
        ...     warm = fedpa.server.schedules.warmup(rounds)
        ...     return fedpa.fedavg(local, server._replace(schedule=warm))
        >>> local = fedpa.LocalTraining(0.1, batch_size=10)
        >>> slow_start(local, fedpa.Server(fedpa.server.sgd(1.0)), rounds=5).settings()["rounds"]
        5
    """
    signature = inspect.signature(builder)

    @functools.wraps(builder)
    def build(*args: P.args, **options: P.kwargs) -> Described:
        method = builder(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        inner = method.build if isinstance(method, Described) else method
        return Described(inner, build, bound.arguments)

    return build


def count_population(method: Method, sizes: Iterable[int]) -> float:
    """Σ q_i over all clients, of these sizes; 1 where the method does not ask for it."""
    if not isinstance(method, Described) or not method.lacks_population:
        return 1.0
    return total_weight(method.arguments["server"].weighting, sizes)


def set_population(method: Method, population: float) -> Method:
    """Pass Σ q_i over all clients to the method, if it needs it."""
    if not isinstance(method, Described) or not method.lacks_population:
        return method
    return method.builder(**{**method.arguments, "population": population})


def _plain(arguments: Mapping[str, Any], side: str = "") -> dict[str, Any]:
    """The settings among a builder's arguments."""
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, Aggregation):
            continue  # functions
        if isinstance(value, optax.GradientTransformation):
            steps = _take_steps(value)
            if steps and math.isfinite(steps[0]):
                settings[f"{side}_step"] = steps[0]
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            settings = _plain(value._asdict(), "client" if name == "local" else name) | settings
        elif isinstance(value, Described):
            settings = {**value.settings(), name: value.name} | settings
        elif name == "optimizer" and isinstance(value, int | float):
            settings[f"{side}_step"] = value
        elif isinstance(value, np.generic):
            settings.setdefault(name, value.item())
        elif isinstance(value, bool | int | float | str):
            settings.setdefault(name, value)
    return settings


def sample_functions(arguments: Mapping[str, Any]) -> list[Any]:
    """What the functions among a builder's arguments give, so that two methods can be compared.

    Of an optimizer its first steps, of a schedule its value in a few rounds, of another its name.
    """
    found: list[Any] = []
    for name, value in arguments.items():
        if isinstance(value, optax.GradientTransformation):
            found.append(_take_steps(value))
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            found += sample_functions(value._asdict())
        elif isinstance(value, Described):
            found += [value.name, *sample_functions(value.arguments)]
        elif name == "schedule":
            found.append([float(f"{float(value(t)):.6g}") for t in (0, 1, 10, 100, 1000)])
        elif callable(value):
            found.append(getattr(value, "__qualname__", type(value).__name__))
    return found


def has_functions(method: Described) -> bool:
    """Whether it was given functions that `sample_functions` knows by name alone.

    Such are a sampler, a delta, an aggregation; not optimizers, schedules and defaults.
    """
    parameters = inspect.signature(method.builder).parameters
    return _has_functions(method.arguments, {name: p.default for name, p in parameters.items()})


def _has_functions(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
    for name, value in arguments.items():
        known = isinstance(value, optax.GradientTransformation) or name == "schedule"
        if known or value is defaults.get(name):
            continue
        if isinstance(value, Described):
            found = has_functions(value)
        elif isinstance(value, tuple) and hasattr(value, "_asdict"):
            found = _has_functions(value._asdict(), getattr(value, "_field_defaults", {}))
        else:
            found = callable(value)
        if found:
            return True
    return False


def _take_steps(optimizer: optax.GradientTransformation) -> list[float]:
    """Its steps for three gradients; none of one that must be given more than a gradient."""
    theta, steps = np.zeros(1, np.float32), []
    with contextlib.suppress(Exception):
        state = optimizer.init(theta)
        for gradient in (1.0, -0.5, 2.0):
            step, state = optimizer.update(theta + np.float32(gradient), state, theta)
            steps.append(float(f"{abs(float(np.asarray(step)[0])):.6g}"))
    return steps
