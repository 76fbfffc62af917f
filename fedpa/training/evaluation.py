"""Evaluation as a callback.

Of a function of the user's: `eval/<name>` for each of its metrics. Of a task: `valid/<name>` on the
validation clients, if there are any; `eval/<name>` on the split that curves show; after the last
round `test/<name>` on the whole test split. What is chosen (a best model, when to stop) is chosen
on validation.
"""

from collections.abc import Callable, Mapping
from typing import Any

from fedpa.data.federated import FederatedData
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


def task_evaluation(problem: Problem, metric: str, options: TaskOptions, every: int) -> Callback:
    """Every so many rounds and after the last: the split of the curves, and validation."""
    split = curve_split(problem, options)
    measured = {
        name: _measured(problem, data, metric, options.eval_examples)
        for name, data in evaluated_splits(problem, options).items()
    }

    def callback(event: Event) -> Mapping[str, float] | None:
        if not _due(event, every):
            return None
        values = {name: evaluate(event.params) for name, evaluate in measured.items()}
        found = _prefixed("eval", values[split])
        return found | _prefixed("valid", values.get("validation", {}))

    return callback


def evaluated_splits(problem: Problem, options: TaskOptions) -> dict[str, FederatedData]:
    """What is evaluated during a run."""
    there = {"validation": problem.validation, "test": problem.test}
    wanted = (curve_split(problem, options), "validation")
    return {name: data for name, data in there.items() if data is not None and name in wanted}


def on_all_of_test(
    problem: Problem, metric: str, options: TaskOptions, params: Any, record: Mapping[str, Any]
) -> dict[str, float]:
    """`test/…` of the final parameters; `record` is their round's."""
    sizes = (problem.test.num_examples(name) for name in problem.test.ids)
    whole = curve_split(problem, options) == "test" and sum(sizes) <= options.eval_examples
    shown = {key: value for key, value in record.items() if key.startswith("eval/")}
    if whole and shown:  # the curve's last point is that already
        return {f"test/{key.removeprefix('eval/')}": value for key, value in shown.items()}
    return _prefixed("test", _measured(problem, problem.test, metric, None)(params))


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
