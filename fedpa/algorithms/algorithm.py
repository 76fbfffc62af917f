"""Algorithm 1, generalized federated optimization, as an assembly of functions.

Message, result and client state are pytrees of the algorithm's own choosing: an engine moves,
weighs and averages them without knowing which algorithm it runs. Rounds count from 0 here.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, ParamSpec

import numpy as np
import optax

from fedpa.errors import FedpaError
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.objective import Objective
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight
from fedpa.server.weighting import total_weight
from fedpa.types import Key, Params

State = Any
Message = Any
ClientState = Any
Round = Any
"""The number of the round, from 0; a traced integer inside compiled code."""

BURN_IN = "burn-in"
SAMPLING = "sampling"
TRAINING = "training"
WITH = " with "
"""Between a phase's name and what some of its rounds have besides."""


def stage(phase: str) -> str:
    """A phase whatever single rounds have besides: burn-in, of `burn-in with precision`."""
    return phase.split(WITH)[0]


class ClientResult(NamedTuple):
    result: Result
    """What is sent to the server and averaged there."""
    weight: Weight
    """q_i, or a tree prefix of the result: each subtree is averaged by its own weight."""
    state: ClientState
    """What the client keeps for the next round it takes part in."""
    info: Any
    """A NamedTuple of scalars for people to see; averaged over clients as `train/<name>`."""


@dataclasses.dataclass(frozen=True)
class PartedUpdate:
    """A client update in three parts, for hosts whose NumPy beats compiled code at the second.

    Called, it is an ordinary client update that can be traced as a whole. An engine may run the
    parts instead: after(carried, between(handed)) with (carried, handed) = before(inputs).
    """

    whole: Callable[[Message, ClientData, ClientState, Key], ClientResult]
    before: Callable[[Message, ClientData, ClientState, Key], tuple[Any, Any]]
    """Traceable: the inputs → (what stays on the device, what is handed to the host)."""
    between: Callable[[Any], Any]
    """On the host, in NumPy."""
    after: Callable[[Any, Any], ClientResult]
    """Traceable: what stayed, and what the host made → the result."""

    def __call__(
        self, message: Message, data: ClientData, state: ClientState, key: Key
    ) -> ClientResult:
        return self.whole(message, data, state, key)


ClientUpdate = Callable[[Message, ClientData, ClientState, Key], ClientResult] | PartedUpdate


class Inquiry(NamedTuple):
    """What a round's clients are asked before they begin: a round trip of its own."""

    broadcast: Callable[[State], Message]
    """A part of the message that follows, which is not sent again."""
    client: ClientUpdate
    """It keeps no state: what it returns as one is not looked at."""
    receive: Callable[[State, Aggregate], State]
    """(server state, what the clients answered, aggregated) → server state."""


class Algorithm(NamedTuple):
    init: Callable[[Params], State]
    """θ → server state."""
    phase: Callable[[int], str]
    """round → the name of the phase it belongs to."""
    broadcast: Callable[[State, Round], Message]
    """What clients are sent."""
    clients: Mapping[str, ClientUpdate]
    """The client update of each phase: one program each."""
    client_init: Callable[[Params], ClientState]
    """θ → the state of a client that takes part for the first time; () if it keeps none."""
    aggregation: Aggregation
    """How results become one."""
    server: Callable[[State, Aggregate, Round], tuple[State, Any]]
    """ServerUpdate. Its info is `ServerInfo`, or a NamedTuple of that and more scalars for people
    to see, as `train/<name>`."""
    parameters: Callable[[State], Params]
    """server state → the θ to evaluate and to return."""
    inquiry: Inquiry | None = None


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
