"""A run after one of its rounds: all that the rounds to come depend on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedpa.algorithms.fedopt import ClientState
from fedpa.training.history import History


class Snapshot(NamedTuple):
    """Cohorts and keys need no place here: they are functions of the seed and the round."""

    round: int
    """Rounds done."""
    state: Any
    """The algorithm's server state: parameters, optimizer, averages."""
    params: Any
    """The parameters θ to evaluate and to return, as `algorithm.parameters` gives them."""
    client_states: Mapping[str, ClientState]
    """Of every client that took part and keeps a state."""
    history: History
    """The records of the rounds done; those behind `round` are of later ones."""
    memory: Mapping[str, Any]
    """What `Remembering` callbacks remember, by their names."""
    stopped: str | None = None
    """Why a callback ended the run, if one did."""


Keep = Callable[[Snapshot], None]
"""Called after every round."""
