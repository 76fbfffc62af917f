"""A run after one of its rounds: all that the rounds to come depend on."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedpa.algorithms.fedopt import ClientState
from fedpa.training.history import History, Record


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
    """The records of the rounds done, but for `untold`; those behind `round` are of later ones."""
    memory: Mapping[str, Any]
    """What `Remembering` callbacks remember, by their names."""
    stopped: str | None = None
    """Why a callback ended the run, if one did."""
    untold: Record | None = None
    """The record of this round if its callbacks have not been called yet."""
    before_callbacks: "Snapshot | None" = None
    """Of the last round: the run before its callbacks were called."""

    @property
    def stored(self) -> "Snapshot":
        """What a checkpoint holds.

        Callbacks may do more in the last round, which is evaluated whether it is its turn or not. A
        run that is extended calls them again, for a round that is one of many.
        """
        return self if self.before_callbacks is None else self.before_callbacks


Keep = Callable[[Snapshot], None]
"""Called after every round."""
