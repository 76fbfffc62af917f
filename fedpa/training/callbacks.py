"""What happens after each round is a callback: evaluation, logs, progress, stopping.

A callback is called with the round's `Event` and may return metrics, which are added to the
round's record for the callbacks after it, or `Stop`. One that must know of earlier rounds is
`Remembering`: what it remembers is part of every checkpoint, so that a resumed run stops where an
uninterrupted one does. What needs opening and closing is a context manager that gives a callback
(`fedpa.experiments.report.live.watch_run`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.training.history import plain

BEST = "best"
"""Under which a run remembers its best round."""


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
    """Whether the run is over; if not, it can be resumed with the next round."""


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
Evaluate = Callable[[Any], Mapping[str, Any]]
"""params → metrics by name."""


def evaluation(evaluate: Evaluate, every: Any = 1) -> Callback:
    """Call `evaluate` every `every` rounds, and after the last: `eval/<name>`."""
    return at_rounds(name_metrics(evaluate), every)


def at_rounds(evaluate: Evaluate, every: Any) -> Callback:
    """Evaluate every `every` rounds, and after the last."""
    check_integer("eval_every", every, 1)

    def callback(event: Event) -> Mapping[str, Any] | None:
        if event.round % every == 0 or event.round == event.rounds:
            return evaluate(event.params)
        return None

    return callback


def name_metrics(evaluate: Evaluate) -> Evaluate:
    """Name a user's metrics `eval/<name>`."""

    def name(params: Any) -> dict[str, Any]:
        metrics = evaluate(params)
        if not isinstance(metrics, Mapping):
            raise refuse("evaluate's answer", metrics, 'must be metrics by name: {"accuracy": 0.9}')
        return {f"eval/{name}": value for name, value in metrics.items()}

    return name


def initial_memories(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What callbacks remember before the first round, by their names."""
    remembering = [callback for callback in callbacks if isinstance(callback, Remembering)]
    memories = {c.name: _as_json(c.name, c.init) for c in remembering}
    if len(memories) < len(remembering):
        names = [callback.name for callback in remembering]
        raise refuse("callbacks", names, "those that remember must have names of their own")
    return memories


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuse a user's callbacks whose memories could not be kept under their names."""
    if BEST in initial_memories(callbacks):
        raise refuse("callbacks", BEST, "is the name of fedpa's own: give yours another")


def call_callbacks(
    callbacks: Sequence[Callback], event: Event, memory: Mapping[str, Any]
) -> tuple[dict[str, Any], Stop | None]:
    """Call every callback, in turn: what is remembered now, and whether to stop.

    Their metrics are added to the event's record.
    """
    memory = dict(memory)
    stops = []
    answer: Any
    for callback in callbacks:
        if isinstance(callback, Remembering):
            remembered, answer = callback.update(memory[callback.name], event)
            memory[callback.name] = _as_json(callback.name, remembered)
        else:
            answer = callback(event)
        if isinstance(answer, Stop):
            stops.append(answer)
        elif not isinstance(answer, Mapping | None):
            expected = "must be metrics by name, fedpa.Stop(…) or None"
            raise refuse("callback's answer", answer, expected)
        else:
            event.record.update(plain(answer or {}))
    # A run that is over is over, also where it was to pause; one whose rounds are done can't pause.
    over = [stop for stop in stops if stop.finished]
    if event.round < event.rounds:
        over += stops
    return memory, _agree(over[0] if over else None)


def _as_json(name: str, remembered: Any) -> Any:
    """What a callback remembers as it will be after a checkpoint, resumed or not."""
    try:
        return json.loads(json.dumps(remembered))
    except (TypeError, ValueError) as error:
        raise FedpaError(f"callback {name!r} remembers what JSON can't hold: {error}") from None


def _agree(stop: Stop | None) -> Stop | None:
    """Where several processes run together, the first says for all when to stop."""
    if jax.process_count() == 1:
        return stop
    said = np.array([stop is not None, stop is not None and stop.finished])
    stops, finished = multihost_utils.broadcast_one_to_all(said)
    if not stops:
        return None
    return stop or Stop("stopped by process 0", bool(finished))
