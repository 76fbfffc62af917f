"""Callbacks, called after each round: evaluation, logs, progress, stopping.

A callback is called with the round's `Event` and may return metrics, which are added to the
round's record for the callbacks after it, or `Stop`. A callback with state is a `Remembering`: its
state is part of every checkpoint, so that a resumed run stops where an uninterrupted one does
(except for time limits). A callback that must be opened and closed is a context manager that yields
one (`fedpa.experiments.report.live.watch_run`).
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedpa.algorithms.fedopt import State
from fedpa.algorithms.plateau import Plateau, is_level
from fedpa.errors import FedpaError, check_integer, check_number, check_takes, refuse
from fedpa.metrics.metric import lower_is_better
from fedpa.training.history import plain
from fedpa.training.options import WINDOW
from fedpa.types import Model

BEST = "best"
"""Name of the memory of the best round."""
SWITCH = "switch"
"""Name of the memory of the plateau."""
AT_PLATEAU = "the plateau is reached"
"""Why a run was ended by `stop_at_plateau`."""


class Event(NamedTuple):
    """A round that has just ended, as callbacks are given it.

    Args:
        round: From 1.
        rounds: How many the run is to have.
        params: The model as the user gave it, with the parameters of this round.
        state: The algorithm's server state.
        record: The round's metrics so far.
        cohort: The clients that took part (default: ()).
    Example:
        >>> event = Event(3, 10, None, None, {"train/loss": 0.5})
        >>> event.round, event.record["train/loss"]
        (3, 0.5)
    """

    round: int
    rounds: int
    params: Model
    state: State
    record: dict[str, Any]
    cohort: Sequence[str] = ()


class Stop(NamedTuple):
    """Returned by a callback to end the run after this round.

    Args:
        reason: Why, for records and people (default: "stopped by a callback").
        finished: Whether the run is over; if not, it can be resumed with the next round (default:
            True).
    Example:
        >>> def callback(event):
        ...     return Stop("good enough") if event.record["train/loss"] < 0.1 else None
        >>> callback(Event(3, 10, None, None, {"train/loss": 0.05}))
        Stop(reason='good enough', finished=True)
    """

    reason: str = "stopped by a callback"
    finished: bool = True


Answer = Mapping[str, Any] | Stop | None


class Remembering(NamedTuple):
    """A callback with a memory, in the manner of optax: init, and update.

    Its memory is part of every checkpoint, so that a resumed run does what an uninterrupted one
    does. A callback that counts over rounds in variables of its own would start again.

    Args:
        name: Under which its memory is kept in checkpoints; no two callbacks of a run share one.
        init: What it remembers before the first round: anything that JSON can hold.
        update: (memory, event) → (new memory, answer).
    Example:
        >>> def count(memory, event):  # rounds in which clients failed
        ...     failed = memory + (event.record["train/rejected"] > 0)
        ...     return failed, {"rounds_with_failures": failed}
        >>> event = Event(3, 9, None, None, {"train/rejected": 1})
        >>> Remembering("failures", 0, count).update(2, event)
        (3, {'rounds_with_failures': 3})
    """

    name: str
    init: Any
    update: Callable[[Any, Event], tuple[Any, Answer]]


@dataclasses.dataclass(frozen=True)
class Watching:
    """A callback that is also called before the first round of each phase, when it is compiled."""

    update: Callable[[Event], Answer]
    """Called after every round."""
    begin: Callable[[int, int, str], None]
    """(round, rounds, phase): once for each phase in this process."""

    def __call__(self, event: Event) -> Answer:
        return self.update(event)


Callback = Callable[[Event], Answer] | Remembering
"""Called after every round: returns metrics by name, which are added to the round's record, `Stop`,
or None."""
Evaluate = Callable[[Model], Mapping[str, Any]]
"""params → metrics by name."""


def evaluation(evaluate: Evaluate, every: int = 1) -> Callback:
    """Make a callback that evaluates, as `fit` does from `evaluate` and `eval_every`.

    Args:
        evaluate: A function of the model that returns metrics by name, recorded as `eval/<name>`.
        every: Rounds between evaluations, ≥ 1; the last round is always evaluated.
    Returns:
        A callback for `train`, which takes no `evaluate`.
    Raises:
        FedpaError: `every` is out of range.
    Example:
        >>> callback = evaluation(lambda params: {"size": abs(params)}, every=5)
        >>> callback(Event(5, 100, -3.0, None, {}))
        {'eval/size': 3.0}
    """
    return at_rounds(name_metrics(evaluate), every)


def at_rounds(evaluate: Evaluate, every: int) -> Callback:
    """Evaluate every `every` rounds, and after the last."""
    check_integer("eval_every", every, 1)

    def callback(event: Event) -> Answer:
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
    """Collect the initial states of callbacks, by name."""
    remembering = [callback for callback in callbacks if isinstance(callback, Remembering)]
    memories = {c.name: _as_json(c.name, c.init) for c in remembering}
    if len(memories) < len(remembering):
        names = [callback.name for callback in remembering]
        raise refuse("callbacks", names, "callbacks with state must have different names")
    return memories


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that these are callbacks, and that the names of their states are usable."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, Remembering):
        raise refuse("callbacks", callbacks, "must be a list of them: callbacks=[…]")
    for callback in callbacks:
        if not isinstance(callback, Remembering):
            check_takes("callbacks", callback, "(event)")
    if BEST in initial_memories(callbacks):
        raise refuse("callbacks", BEST, "is reserved by fedpa: give another name")


def call_callbacks(
    callbacks: Sequence[Callback], event: Event, memory: Mapping[str, Any]
) -> tuple[dict[str, Any], Stop | None]:
    """Call every callback in turn; return the new states, and whether to stop.

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
    # `finished` overrides a pause; a run whose rounds are done can't pause.
    over = [stop for stop in stops if stop.finished]
    if event.round < event.rounds:
        over += stops
    return memory, _agree(over[0] if over else None)


def _as_json(name: str, remembered: Any) -> Any:
    """Convert a callback's state to what a checkpoint would return."""
    try:
        return json.loads(json.dumps(remembered))
    except (TypeError, ValueError) as error:
        raise FedpaError(f"callback {name!r}: its state can't be stored as JSON: {error}") from None


def _agree(stop: Stop | None) -> Stop | None:
    """With several processes, process 0 decides for all when to stop."""
    if jax.process_count() == 1:
        return stop
    said = np.array([stop is not None, stop is not None and stop.finished])
    stops, finished = multihost_utils.broadcast_one_to_all(said)
    if not stops:
        return None
    return stop or Stop("stopped by process 0", bool(finished))


# The best round, early stopping, targets, time limits.


class Best(NamedTuple):
    """The metric of the best round, whose checkpoint is kept.

    Args:
        metric: As records name it: valid/accuracy.
        lower: Whether lower is better; default: if the metric is named a loss, an error or a
            perplexity.
    Example:
        >>> is_lower(Best("eval/mse")), is_lower(Best("eval/cost", lower=True))
        (True, True)
    """

    metric: str
    lower: bool | None = None


def is_lower(best: Best) -> bool:
    """Whether lower is better."""
    return lower_is_better(best.metric) if best.lower is None else best.lower


def remember_best(best: Best) -> Remembering:
    """Make a callback that tracks the best round: `{"metric": …, "value": …, "round": …}`."""
    better = _better(best, 0.0)

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        value = _value(event, best.metric)
        if value is not None and better(value, memory["value"]):
            memory = {"metric": best.metric, "value": value, "round": event.round}
        return memory, None

    return Remembering(BEST, {"metric": best.metric, "value": None, "round": None}, update)


def best_of(memory: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the best round so far, as `remember_best` stores it, or None."""
    best = memory.get(BEST)
    return best if best is not None and best["round"] is not None else None


def best_round(memory: Mapping[str, Any]) -> int | None:
    """Return the number of the best round so far."""
    best = best_of(memory)
    return None if best is None else best["round"]


def early_stopping(
    metric: str, patience: int, min_improvement: float = 0.0, lower: bool | None = None
) -> Remembering:
    """Make a callback that ends a run whose metric no longer improves.

    Args:
        metric: Its name in records: "eval/accuracy".
        patience: Consecutive evaluations without improvement, ≥ 1, after which the run ends.
        min_improvement: Smallest change that counts as improvement, ≥ 0.
        lower: Whether lower is better; default: if the metric is named a loss, an error or a
            perplexity.
    Returns:
        A callback for `fit(…, callbacks=[…])`; resumed runs keep its count.
    Raises:
        FedpaError: A setting is out of range, or (in a run) there is no such metric.
    Example:
        >>> callback = early_stopping("eval/mse", patience=3)
        >>> event = Event(1, 9, None, None, {"eval/mse": 2.0})
        >>> callback.update(callback.init, event)[0]
        {'value': 2.0, 'round': 1, 'waited': 0}
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
            f"early stopping: {metric} did not improve in {patience} evaluations; best {best}"
        )

    name = f"early_stopping {metric}"
    return Remembering(name, {"value": None, "round": None, "waited": 0}, update)


def stop_at(
    metric: str, target: float, window: int = WINDOW, lower: bool | None = None
) -> Remembering:
    """Make a callback that ends a run when a running average of a metric reaches a target.

    It never ends a run before round `window`. From then on it agrees with the rounds to a target
    in tables.

    Args:
        metric: Its name in records: "eval/accuracy".
        target: The value to reach, any finite number.
        window: Number of last rounds whose evaluations are averaged, ≥ 1; default: 10.
        lower: Whether lower is better; default: if the metric is named a loss, an error or a
            perplexity.
    Returns:
        A callback for `fit(…, callbacks=[…])`; resumed runs keep its average.
    Raises:
        FedpaError: A setting is out of range, or (in a run) there is no such metric.
    Example:
        >>> callback = stop_at("eval/accuracy", 0.8, window=1)
        >>> memory, answer = callback.update([], Event(4, 9, None, None, {"eval/accuracy": 0.9}))
        >>> answer.reason
        'target reached: the 1-round average of eval/accuracy is 0.9 (wanted 0.8)'
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


def stop_at_plateau(rule: Plateau) -> Remembering:
    """Make a callback that ends a run at a plateau, after the callbacks before it.

    What it remembers is what a run that switches at the plateau does; such a run can continue from
    the end of this one.
    """
    sign = 1.0 if lower_is_better(rule.metric) else -1.0

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        if memory["round"] is not None:
            return memory, None
        value, level = _value(event, rule.metric), memory["level"]
        values = memory["values"]
        if value is not None and math.isfinite(value):
            values = [*values, sign * value][-2 * rule.window :]
            is_one_more = len(values) == 2 * rule.window and is_level(rule, values)
            level = level + 1 if is_one_more else 0
        reached = level >= rule.window and event.round >= rule.at_least
        reached |= rule.at_most is not None and event.round >= rule.at_most
        memory = {"round": event.round if reached else None, "values": values, "level": level}
        return memory, Stop(AT_PLATEAU) if reached else None

    return Remembering(SWITCH, {"round": None, "values": [], "level": 0}, update)


def max_minutes(minutes: float, clock: Callable[[], float] = time.monotonic) -> Callback:
    """Make a callback that pauses a run after some time; it can be resumed.

    Args:
        minutes: Minutes from this call on, > 0.
        clock: Gives the time in seconds.
    Returns:
        A callback for `fit(…, callbacks=[…])`: the run stops after the round in which time is up.
    Raises:
        FedpaError: `minutes` is out of range.
    Example:
        >>> times = iter([0.0, 61.0])
        >>> callback = max_minutes(1, clock=lambda: next(times))
        >>> callback(Event(7, 100, None, None, {}))
        Stop(reason='1 minutes are over', finished=False)
    """
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
    """Read the round's value; None if it was not evaluated. Refuses an unknown metric."""
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
