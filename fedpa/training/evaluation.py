"""Evaluation as a callback: `eval/<name>` for each of a function's metrics."""

from collections.abc import Callable, Mapping
from typing import Any

from fedpa.errors import check_integer, refuse
from fedpa.training.callbacks import Callback, Event

Evaluate = Callable[[Any], Mapping[str, float]]
"""params → metrics by name."""


def evaluation(evaluate: Evaluate, every: Any = 1, prefix: str = "eval") -> Callback:
    """Call `evaluate` every so many rounds, and after the last."""
    check_integer("eval_every", every, 1)

    def callback(event: Event) -> Mapping[str, float] | None:
        if event.round % every and event.round != event.rounds:
            return None
        metrics = evaluate(event.params)
        if not isinstance(metrics, Mapping):
            raise refuse("evaluate's answer", metrics, 'must be metrics by name: {"accuracy": 0.9}')
        return {f"{prefix}/{name}": float(value) for name, value in metrics.items()}

    return callback
