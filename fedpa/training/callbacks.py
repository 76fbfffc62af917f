"""What happens after each round is a callback: evaluation, logs, progress, stopping.

A callback is called with the round's `Event` and may return metrics, which are added to the
round's record for the callbacks after it, or `Stop`. One that must know of earlier rounds is
`Remembering`: what it remembers is part of every checkpoint, so that a resumed run stops where an
uninterrupted one does. What needs opening and closing is a context manager that gives a callback
(`fedpa.experiments.report.live.watch_run`).
"""

from collections.abc import Callable, Mapping, Sequence
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
    cohort: Sequence[str] = ()
    """The clients that took part."""


class Stop(NamedTuple):
    """Returned by a callback to end the run after this round."""

    reason: str = "stopped by a callback"
    finished: bool = True
    """Whether the run is over; if not, resuming it goes on with the next round."""


Answer = Mapping[str, Any] | Stop | None


class Remembering(NamedTuple):
    """A callback with a memory, in the manner of optax: init, and update."""

    name: str
    """Under which its memory is kept in checkpoints; no two callbacks of a run share one."""
    init: Any
    """What it remembers before the first round: anything that JSON can hold."""
    update: Callable[[Any, Event], tuple[Any, Answer]]
    """(memory, event) → (new memory, answer)."""


Callback = Callable[[Event], Answer] | Remembering
