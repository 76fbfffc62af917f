"""Evaluation as a callback.

Of a function of the user's: `eval/<name>` for each of its metrics. Of a task: `valid/<name>` on the
validation clients, if there are any; `eval/<name>` on the split that curves show; after the last
round `test/<name>` on the whole test split. What is chosen (a best model, when to stop) is chosen
on validation.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedpa.errors import check_integer, refuse
from fedpa.metrics.streaming import distribution, streamed
from fedpa.tasks.options import TaskOptions
from fedpa.tasks.task import Problem
from fedpa.training.callbacks import Callback, Event

Evaluate = Callable[[Any], Mapping[str, float]]
"""params → metrics by name."""


def evaluation(evaluate: Evaluate, every: Any = 1, prefix: str = "eval") -> Callback:
    """Call `evaluate` every so many rounds, and after the last."""
    check_integer("eval_every", every, 1)

    def callback(event: Event) -> Mapping[str, float] | None:
        if not _due(event, every):
            return None
        metrics = evaluate(event.params)
        if not isinstance(metrics, Mapping):
            raise refuse("evaluate's answer", metrics, 'must be metrics by name: {"accuracy": 0.9}')
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    return callback


def task_evaluation(
    problem: Problem, metric: str, options: TaskOptions, every: int
) -> list[Callback]:
    """The callbacks that evaluate a task: the split of curves, validation, and all of test."""
    split = curve_split(problem, options)
    during = {"validation": problem.validation, "test": problem.test}
    measured = {
        name: _measured(problem, data, metric, options.eval_examples)
        for name, data in during.items()
        if data is not None and name in (split, "validation")
    }
    # Where curves show all of the test split, that is the evaluation at the end, too.
    sizes = (problem.test.num_examples(name) for name in problem.test.ids)
    same = split == "test" and sum(sizes) <= options.eval_examples
    at_the_end = measured["test"] if same else _measured(problem, problem.test, metric, None)

    def callback(event: Event) -> Mapping[str, float] | None:
        found: dict[str, float] = {}
        if _due(event, every):
            values = {name: evaluate(event.params) for name, evaluate in measured.items()}
            found |= _prefixed("eval", values[split])
            if "validation" in values:
                found |= _prefixed("valid", values["validation"])
        if event.round == event.rounds:
            found |= _prefixed("test", values["test"] if same else at_the_end(event.params))
        return found or None

    return [callback]


def curve_split(problem: Problem, options: TaskOptions) -> str:
    """The split that curves show."""
    if options.eval_split == "auto":
        return "test" if problem.validation is None else "validation"
    if options.eval_split == "validation" and problem.validation is None:
        raise refuse(
            "eval_split",
            options.eval_split,
            "there are no validation clients: give validation_share, or eval_split = test",
        )
    return options.eval_split


def _measured(problem: Problem, data: Any, metric: str, most: int | None) -> Evaluate:
    evaluate = streamed(problem.metric, data, problem.eval_batch_size, most)

    def values(params: Any) -> dict[str, float]:
        evaluated = evaluate(params)
        return evaluated.values | distribution(evaluated, [metric])

    return values


def _due(event: Event, every: int) -> bool:
    return event.round % every == 0 or event.round == event.rounds


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
