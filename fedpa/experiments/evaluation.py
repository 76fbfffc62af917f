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
from fedpa.errors import match_name, refuse
from fedpa.experiments.tasks.task import TaskOptions
from fedpa.metrics.metric import Metric, join_metrics
from fedpa.metrics.streaming import PERCENTILES, compute_percentiles, make_evaluator
from fedpa.metrics.uncertainty import NAMES, uncertainty
from fedpa.training.problem import Problem, some_examples


def evaluate_task(
    problem: Problem, metric: str, options: TaskOptions
) -> Callable[[Any], dict[str, float]]:
    """params → `eval/…` on the split of the curves and `valid/…` on validation, if there is any."""
    evaluations = {
        split: _evaluate_split(problem, data, metric, options, options.eval_examples)
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
    names = _list_values(problem, add_metrics(problem, options.metrics))
    over_clients = [f"{metric}_p{p}" for p in PERCENTILES]
    splits = _evaluated_splits(problem, options)
    return [
        f"{split}/{name}"
        for split, data in splits.items()
        for name in (names if len(data.ids) == 1 else [*names, *over_clients])
    ]


def add_metrics(problem: Problem, names: str | None) -> Metric:
    """Join the task's own metric with those of these names, separated by commas.

    Raises:
        FedpaError: The task does not have one of them, or has no likelihood.
    """
    if names is None:
        return problem.metric
    own = _list_values(problem, problem.metric)
    if problem.likelihood is None:
        has = f"the task has no likelihood, so that only its own are available: {', '.join(own)}"
        raise refuse("metrics", names, has)
    # Of one model mutual information is 0.
    missing = {*own, "mutual_information"}
    known = [name for name in NAMES[problem.likelihood.link] if name not in missing]
    words = [word.strip() for word in names.split(",") if word.strip()]
    chosen = [match_name(word, known) for word in words]
    if not words or None in chosen:
        what = f"{words[chosen.index(None)]!r} is not available" if words else "names no metric"
        has = f"{what}: choose from {', '.join(known)} (always: {', '.join(own)})"
        raise refuse("metrics", names, has)
    asked = [name for name in dict.fromkeys(chosen) if name is not None]
    return join_metrics(problem.metric, uncertainty(problem.likelihood, names=asked))


def _list_values(problem: Problem, metric: Metric) -> list[str]:
    """List the names of a metric's values, before anything is computed."""
    batch = jax.tree.map(lambda x: np.asarray(x)[:1], some_examples(problem.clients))

    def measure(key: Any, batch: Any) -> tuple[Any, Any]:
        each, vectors = metric.measure(problem.init(key), batch)
        return dict(each), dict(vectors)

    each, vectors = eqx.filter_eval_shape(measure, jax.random.key(0), batch)
    of_all = metric.overall({name: np.zeros(v.shape[1:]) for name, v in vectors.items()})
    return [*metric.values(dict.fromkeys(each, 0.0)), *of_all]


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
    values = _evaluate_split(problem, problem.test, metric, options, None)(params)
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
    problem: Problem, data: FederatedData, metric: str, options: TaskOptions, most: int | None
) -> Callable[[Any], dict[str, float]]:
    measured = add_metrics(problem, options.metrics)
    evaluate = make_evaluator(measured, data, problem.eval_batch_size, most)

    def values(params: Any) -> dict[str, float]:
        evaluation = evaluate(params)
        return evaluation.values | compute_percentiles(evaluation, [metric])

    return values
