"""Evaluation as a callback: `eval/<name>` for each of a function's metrics."""

from collections.abc import Callable, Mapping
from typing import Any

from fedpa.errors import refuse
from fedpa.training.callbacks import Callback, Event

Evaluate = Callable[[Any], Mapping[str, float]]
"""params → metrics by name."""


def evaluation(evaluate: Evaluate, every: int = 1, prefix: str = "eval") -> Callback:
    """Call `evaluate` every so many rounds, and after the last."""
    if every < 1:
        raise refuse("eval_every", every, "must be at least 1")

    def callback(event: Event) -> Mapping[str, float] | None:
        if event.round % every and event.round != event.rounds:
            return None
        return {f"{prefix}/{name}": float(value) for name, value in evaluate(event.params).items()}

    return callback
