"""When a run is good enough, or long enough: early stopping, targets, a limit of time.

All but the limit of time depend on the rounds alone, so that a resumed run stops where an
uninterrupted one does.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedpa.errors import FedpaError, check_integer, check_number, refuse
from fedpa.metrics.metric import lower_is_better
from fedpa.training.callbacks import BEST, Answer, Callback, Event, Remembering, Stop

WINDOW = 10
"""Rounds of the running average, as in the paper."""


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
