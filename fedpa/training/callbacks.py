"""What happens after each round is a callback: evaluation, logs, progress, stopping.

A callback is called with the round's `Event` and may return metrics, which are added to the
round's record for the callbacks after it, or `Stop`. One that must know of earlier rounds is
`Remembering`: what it remembers is part of every checkpoint, so that a resumed run stops where an
uninterrupted one does (but for a limit of time). What needs opening and closing is a context
manager that gives a callback (`fedpa.experiments.report.live.watch_run`).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpa.errors import FedpaError, check_integer, check_number, refuse
from fedpa.metrics.metric import lower_is_better
from fedpa.training.history import plain

BEST = "best"
"""Under which a run remembers its best round."""
WINDOW = 10
"""Rounds of the running average, as in the paper."""


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


# When a run is good enough, or long enough: the best round, early stopping, targets, time.


class Best(NamedTuple):
    """By which metric the best round is chosen; its checkpoint is kept."""

    metric: str
    """As records name it: valid/accuracy."""
    lower: bool | None = None
    """Whether lower is better; None: if the metric is a loss or a perplexity."""


def is_lower(best: Best) -> bool:
    """Whether lower is better."""
    return lower_is_better(best.metric) if best.lower is None else best.lower


def remember_best(best: Best) -> Remembering:
    """Which round was the best so far: `{"metric": …, "value": …, "round": …}`."""
    better = _better(best, 0.0)

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        value = _value(event, best.metric)
        if value is not None and better(value, memory["value"]):
            memory = {"metric": best.metric, "value": value, "round": event.round}
        return memory, None

    return Remembering(BEST, {"metric": best.metric, "value": None, "round": None}, update)


def best_of(memory: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The best round so far, as `remember_best` has it; None if there is none yet."""
    best = memory.get(BEST)
    return best if best is not None and best["round"] is not None else None


def best_round(memory: Mapping[str, Any]) -> int | None:
    """The number of the best round so far."""
    best = best_of(memory)
    return None if best is None else best["round"]


def early_stopping(
    metric: str, patience: Any, min_improvement: Any = 0.0, lower: bool | None = None
) -> Remembering:
    """Stop after `patience` evaluations in a row that were not better than the best before.

    min_improvement: by how much a value must be better to count.
    """
    check_integer("patience", patience, 1)
    check_number("min_improvement", min_improvement)
    better = _better(Best(metric, lower), min_improvement)

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        value = _value(event, metric)
        if value is None:
            return memory, None
        if better(value, memory["value"]):
            return {"value": value, "round": event.round, "waited": 0}, None
        memory = memory | {"waited": memory["waited"] + 1}
        if memory["waited"] < patience:
            return memory, None
        best = f"{memory['value']:.4g} in round {memory['round']}" if memory["round"] else "none"
        return memory, Stop(
            f"early stopping: {metric} was not better in {patience} evaluations; best {best}"
        )

    name = f"early_stopping {metric}"
    return Remembering(name, {"value": None, "round": None, "waited": 0}, update)


def stop_at(metric: str, target: Any, window: Any = WINDOW, lower: bool | None = None) -> Callback:
    """Stop when the mean of the evaluations in the last `window` rounds reaches `target`.

    Not before round `window`: tables count the rounds to a target in the same way.
    """
    check_integer("target_window", window, 1)
    check_number("target", target, least=-math.inf)
    downwards = is_lower(Best(metric, lower))

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        value = _value(event, metric)
        if value is not None:
            memory = [*memory, [event.round, value]]
        memory = [point for point in memory if point[0] > event.round - window]
        if value is None or event.round < window:
            return memory, None
        mean = sum(value for _, value in memory) / len(memory)
        if not (mean <= target if downwards else mean >= target):
            return memory, None
        return memory, Stop(
            f"target reached: the {window}-round average of {metric} is {mean:.4g} "
            f"(wanted {target:g})"
        )

    return Remembering(f"target {metric}", [], update)


def max_minutes(minutes: Any, clock: Callable[[], float] = time.monotonic) -> Callback:
    """Stop, to be resumed later, when this process has trained for so long."""
    check_number("max_minutes", minutes)
    if minutes == 0:
        raise refuse("max_minutes", minutes, "must be above 0")
    end = clock() + 60 * minutes

    def callback(event: Event) -> Answer:
        if clock() < end:
            return None
        return Stop(f"{minutes:g} minutes are over", finished=False)

    return callback


def _value(event: Event, metric: str) -> float | None:
    """The round's value; None if it was not evaluated. A metric that never comes is refused."""
    if metric in event.record:
        value = event.record[metric]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(metric, value, "must be a number to be compared")
        return float(value)
    group = metric.partition("/")[0]
    evaluated = [name for name in event.record if name.partition("/")[0] == group]
    if evaluated or group not in ("eval", "valid", "test"):
        raise FedpaError(
            f"there is no metric {metric!r}: round {event.round} has "
            f"{', '.join(evaluated or event.record)}"
        )
    return None


def _better(best: Best, least: float) -> Callable[[float, float | None], bool]:
    sign = -1.0 if is_lower(best) else 1.0

    def better(value: float, than: float | None) -> bool:
        if math.isnan(value):
            return False
        return than is None or sign * (value - than) > least

    return better
