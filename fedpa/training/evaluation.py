"""Evaluation as a callback.

Of a function of the user's: `eval/<name>` for each of its metrics. Of a task: `valid/<name>` on the
validation clients, if there are any; `eval/<name>` on the split that curves show; after the last
round `test/<name>` on the whole test split. What is chosen (a best model, when to stop) is chosen
on validation.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from fedpa.data.federated import FederatedData, check_when_read
from fedpa.errors import check_integer, refuse
from fedpa.metrics.streaming import PERCENTILES, compute_percentiles, make_evaluator
from fedpa.training.callbacks import Callback, Event
from fedpa.training.problem import Problem

Evaluate = Callable[[Any], Mapping[str, Any]]
"""params → metrics by name."""


@runtime_checkable
class EvaluationOptions(Protocol):
    """What is evaluated during a run."""

    @property
    def eval_split(self) -> str:
        """What curves show: `validation` clients, the `test` split; `auto`: validation if any."""

    @property
    def eval_examples(self) -> int:
        """At most this many examples."""


def evaluation(evaluate: Evaluate, every: Any = 1) -> Callback:
    """Call `evaluate` every `every` rounds, and after the last: `eval/<name>`."""
    return at_rounds(lambda params: evaluated(evaluate, params), every)


def at_rounds(measure: Callable[[Any], Mapping[str, Any]], every: Any) -> Callback:
    """Measure every `every` rounds, and after the last."""
    check_integer("eval_every", every, 1)

    def callback(event: Event) -> Mapping[str, Any] | None:
        if is_due(event.round, event.rounds, every):
            return measure(event.params)
        return None

    return callback


def is_due(t: int, rounds: int, every: int) -> bool:
    """Whether round t is evaluated, as one in `every` or the last."""
    return t % every == 0 or t == rounds


def evaluated(evaluate: Evaluate, params: Any) -> dict[str, Any]:
    """`eval/<name>` of the parameters."""
    metrics = evaluate(params)
    if not isinstance(metrics, Mapping):
        raise refuse("evaluate's answer", metrics, 'must be metrics by name: {"accuracy": 0.9}')
    return _prefixed("eval", metrics)


def task_evaluation(
    problem: Problem, metric: str, options: EvaluationOptions
) -> Callable[[Any], dict[str, float]]:
    """params → `eval/…` on the split of the curves and `valid/…` on validation, if there is any."""
    split = curve_split(problem, options)
    measured = {
        name: _measured(problem, data, metric, options.eval_examples)
        for name, data in evaluated_splits(problem, options).items()
    }

    def measure(params: Any) -> dict[str, float]:
        values = {name: evaluate(params) for name, evaluate in measured.items()}
        found = _prefixed("eval", values[split])
        return found | _prefixed("valid", values.get("validation", {}))

    return measure


def reported(problem: Problem, metric: str, options: EvaluationOptions) -> list[str]:
    """The names of the metrics that rounds report, known before anything is computed."""
    data = problem.clients
    some = next((name for name in data.ids if data.num_examples(name) > 0), data.ids[0])
    batch = jax.tree.map(lambda x: np.asarray(x)[:1], check_when_read(data).examples(some))

    def measure(key: Any, batch: Any) -> tuple[Any, Any]:
        each, vectors = problem.metric.measure(problem.init(key), batch)
        return dict(each), dict(vectors)

    each, vectors = eqx.filter_eval_shape(measure, jax.random.key(0), batch)
    names = [
        *problem.metric.values(dict.fromkeys(each, 0.0)),
        *problem.metric.overall({name: np.zeros(v.shape[1:]) for name, v in vectors.items()}),
    ]
    over_clients = [f"{metric}_p{p}" for p in PERCENTILES]
    there = evaluated_splits(problem, options)
    splits = {"eval": there[curve_split(problem, options)]}
    if "validation" in there:
        splits["valid"] = there["validation"]
    return [
        f"{split}/{name}"
        for split, data in splits.items()
        for name in (names if len(data.ids) == 1 else [*names, *over_clients])
    ]


def evaluated_splits(problem: Problem, options: EvaluationOptions) -> dict[str, FederatedData]:
    """What is evaluated during a run."""
    there = {"validation": problem.validation, "test": problem.test}
    wanted = (curve_split(problem, options), "validation")
    return {name: data for name, data in there.items() if data is not None and name in wanted}


def on_all_of_test(
    problem: Problem,
    metric: str,
    options: EvaluationOptions,
    params: Any,
    record: Mapping[str, Any],
) -> dict[str, float]:
    """`test/…` of the final parameters; `record` is their round's."""
    sizes = (problem.test.num_examples(name) for name in problem.test.ids)
    whole = curve_split(problem, options) == "test" and sum(sizes) <= options.eval_examples
    shown = {key: value for key, value in record.items() if key.startswith("eval/")}
    if whole and shown:  # the curve's last point is that already
        return {f"test/{key.removeprefix('eval/')}": value for key, value in shown.items()}
    return _prefixed("test", _measured(problem, problem.test, metric, None)(params))


def curve_split(problem: Problem, options: EvaluationOptions) -> str:
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
    evaluate = make_evaluator(problem.metric, data, problem.eval_batch_size, most)

    def values(params: Any) -> dict[str, float]:
        evaluation = evaluate(params)
        return evaluation.values | compute_percentiles(evaluation, [metric])

    return values


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
