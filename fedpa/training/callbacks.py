"""What happens after each round is a callback: evaluation, logs, progress, stopping.

A callback is called with the round's `Event` and may return metrics, which are added to the
round's record for the callbacks after it, or `Stop`. What needs opening and closing is a context
manager that gives a callback (`fedpa.training.metrics_file`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Event(NamedTuple):
    round: int
    """From 1."""
    rounds: int
    params: Any
    """The model as the user gave it, with the parameters of this round."""
    state: Any
    """The algorithm's server state."""
    record: dict[str, Any]
    """The round's metrics so far."""


class Stop(NamedTuple):
    """Returned by a callback to end the run after this round."""

    reason: str = "stopped by a callback"


Callback = Callable[[Event], Mapping[str, Any] | Stop | None]
