"""Evaluation of a task during a run and after it.

`valid/<name>` on the validation clients, if there are any; `eval/<name>` on the split that curves
show; after the last round `test/<name>` on the whole test split. Choices (the best model, when to
stop) use validation clients.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.errors import refuse
from fedpa.experiments.tasks.task import TaskOptions
from fedpa.metrics.streaming import PERCENTILES, compute_percentiles, make_evaluator
from fedpa.training.problem import Problem, some_examples


def evaluate_task(
    problem: Problem, metric: str, options: TaskOptions
) -> Callable[[Any], dict[str, float]]:
    """params → `eval/…` on the split of the curves and `valid/…` on validation, if there is any."""
    evaluations = {
        split: _evaluate_split(problem, data, metric, options.eval_examples)
        for split, data in _evaluated_splits(problem, options).items()
    }
    if curve_split(problem, options) == "validation":  # measured once, named twice
        evaluations.pop("valid")

    def evaluate(params: Any) -> dict[str, float]:
        values = {split: evaluate(params) for split, evaluate in evaluations.items()}
        if problem.validation is not None:
            values.setdefault("valid", values["eval"])
        return {f"{split}/{name}": found[name] for split, found in values.items() for name in found}

    return evaluate


def list_metrics(problem: Problem, metric: str, options: TaskOptions) -> list[str]:
    """List the names of the metrics that rounds report, before anything is computed."""
    batch = jax.tree.map(lambda x: np.asarray(x)[:1], some_examples(problem.clients))

    def measure(key: Any, batch: Any) -> tuple[Any, Any]:
        each, vectors = problem.metric.measure(problem.init(key), batch)
        return dict(each), dict(vectors)

    each, vectors = eqx.filter_eval_shape(measure, jax.random.key(0), batch)
    names = [
        *problem.metric.values(dict.fromkeys(each, 0.0)),
        *problem.metric.overall({name: np.zeros(v.shape[1:]) for name, v in vectors.items()}),
    ]
    over_clients = [f"{metric}_p{p}" for p in PERCENTILES]
    splits = _evaluated_splits(problem, options)
    return [
        f"{split}/{name}"
        for split, data in splits.items()
        for name in (names if len(data.ids) == 1 else [*names, *over_clients])
    ]


def _evaluated_splits(problem: Problem, options: TaskOptions) -> dict[str, FederatedData]:
    """What is evaluated during a run, as records name it."""
    shown = problem.test if curve_split(problem, options) == "test" else problem.validation
    splits = {"eval": shown, "valid": problem.validation}
    return {name: data for name, data in splits.items() if data is not None}


def evaluate_test(
    problem: Problem, metric: str, options: TaskOptions, params: Any, record: Mapping[str, Any]
) -> dict[str, float]:
    """`test/…` of the final parameters on the whole test split; `record` is their round's."""
    sizes = (problem.test.num_examples(name) for name in problem.test.ids)
    whole = curve_split(problem, options) == "test" and sum(sizes) <= options.eval_examples
    shown = {key: value for key, value in record.items() if key.startswith("eval/")}
    if whole and shown:  # the curve's last point is that already
        return {f"test/{key.removeprefix('eval/')}": value for key, value in shown.items()}
    values = _evaluate_split(problem, problem.test, metric, None)(params)
    return {f"test/{name}": value for name, value in values.items()}


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


def _evaluate_split(
    problem: Problem, data: FederatedData, metric: str, most: int | None
) -> Callable[[Any], dict[str, float]]:
    evaluate = make_evaluator(problem.metric, data, problem.eval_batch_size, most)

    def values(params: Any) -> dict[str, float]:
        evaluation = evaluate(params)
        return evaluation.values | compute_percentiles(evaluation, [metric])

    return values
