"""Training, validation and test clients of `fedpa.compare`, and the metrics measured on them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.data.federated import FederatedData, as_federation
from fedpa.data.views import hold_out
from fedpa.errors import refuse
from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.metrics.streaming import compute_percentiles, make_evaluator
from fedpa.objectives.checks import trace
from fedpa.objectives.objective import Objective
from fedpa.training.callbacks import Best, Evaluate, name_metrics
from fedpa.training.problem import bind, some_examples
from fedpa.types import Examples

EVALUATED = 100
"""Number of examples of a batch in evaluation."""
Measure = Callable[[Any, Examples], Any]
"""(params, batch) → one number per example."""


class Splits(NamedTuple):
    """Training clients, validation clients, and the clients that are shown."""

    train: FederatedData
    validation: FederatedData | None
    test: FederatedData | None


def split_clients(clients: Any, validation: Any, test: Any) -> Splits:
    train = as_federation(clients)
    shown = None if test is None else as_federation(test, "test")
    if validation is None or isinstance(validation, Mapping | FederatedData):
        judges = None if validation is None else as_federation(validation, "validation")
        return Splits(train, judges, shown)
    is_number = isinstance(validation, int | float | np.number) and not isinstance(validation, bool)
    if not is_number or not 0 < validation < 1:
        expected = "must be a share of the clients between 0 and 1, or separate clients"
        raise refuse("validation", validation, expected)
    others, judges = hold_out(train, float(validation))
    if judges is None:
        raise refuse("validation", validation, "there is only one client: give separate clients")
    return Splits(others, judges, shown)


def choose_metric(
    by: Any, names: Sequence[str], splits: Splits, evaluates: bool, tunes: bool
) -> Best | None:
    """Choose the metric for tuning and the table, without its split; None if `evaluate` names it.

    names: the metrics measured on clients: the loss, then the user's.
    """
    if tunes and splits.validation is None:
        raise refuse("validation", None, "tune needs validation clients: give a share, as 0.2")
    known = names
    if splits.validation is None and splits.test is None:
        known = []
        if len(names) > 1:
            raise refuse("metrics", names[1:], "need validation or test clients to measure on")
        if not evaluates:
            raise refuse(
                "validation", None, "there is no metric to compare by: give validation=0.2"
            )
    if by is None:
        return Best(known[:2][-1]) if known else None
    best = by if isinstance(by, Best) else Best(by)
    if not isinstance(best.metric, str):
        raise refuse("by", best.metric, "must be the name of a metric, or fedpa.Best(name)")
    if best.metric not in known and (tunes or not evaluates):
        raise refuse("by", best.metric, f"is not measured. Choose from {', '.join(known)}")
    return best


def make_evaluation(
    objective: Objective,
    params: Any,
    splits: Splits,
    metrics: Mapping[str, Measure],
    evaluate: Evaluate | None,
    deciding: Best | None,
) -> Evaluate:
    """Build params → `valid/…` on the validation clients and `eval/…` on the shown clients.

    Shown are the test clients, otherwise the validation clients, and the metrics of `evaluate`.
    """
    measured = {"valid": splits.validation, "eval": splits.test}
    given = {split: data for split, data in measured.items() if data is not None}
    metric = _make_metric(objective, metrics)
    for data in given.values():
        _check_metrics(objective, params, metrics, data)
    # All of a split, cached for the next evaluation.
    sizes = {split: sum(map(data.num_examples, data.ids)) for split, data in given.items()}
    evaluators = {
        split: make_evaluator(metric, data, EVALUATED, sizes[split])
        for split, data in given.items()
    }
    spread = [] if deciding is None else [deciding.metric]
    own = None if evaluate is None else name_metrics(evaluate)

    def values(params: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for split, evaluator in evaluators.items():
            evaluation = evaluator(params)
            numbers = evaluation.values | compute_percentiles(evaluation, spread)
            found |= {f"{split}/{name}": value for name, value in numbers.items()}
            if splits.test is None:  # measured once, named twice
                found |= {f"eval/{name}": value for name, value in numbers.items()}
        for name, value in ({} if own is None else own(params)).items():
            if name in found:
                raise refuse("evaluate's answer", name, "is already measured: give another name")
            found[name] = value
        return found

    return values


def _make_metric(objective: Objective, metrics: Mapping[str, Measure]) -> Metric:
    """Build a metric of the mean loss, weighted as in training, and the means of `metrics`."""

    def measure(params: Any, batch: Examples) -> Counts:
        losses = _as_numbers(objective.loss(params, batch, jax.random.key(0)))
        ones = jnp.ones_like(losses)
        weights = ones if objective.weight is None else _as_numbers(objective.weight(batch))
        each = {name: _as_numbers(f(params, batch)) for name, f in metrics.items()}
        return Counts({**each, "loss": losses * weights, " weight": weights, " examples": ones})

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        means = {name: ratio(sums[name], sums[" examples"]) for name in metrics}
        return {"loss": ratio(sums["loss"], sums[" weight"]), **means}

    return Metric(measure, values)


def _as_numbers(values: Any) -> jax.Array:
    return jnp.asarray(values).astype(jnp.float32)


def _check_metrics(
    objective: Objective,
    params: Any,
    metrics: Mapping[str, Measure],
    data: FederatedData,
) -> None:
    """Check that metrics are functions (params, batch) → one number per example."""
    _, theta, assemble = bind(objective, params)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype)),
        some_examples(data),
    )
    for name, function in metrics.items():
        if name == "loss" or not isinstance(name, str) or not callable(function):
            expected = 'must be functions by name, {"accuracy": f}; the loss is measured anyway'
            raise refuse("metrics", name, expected)
        field = f"metrics[{name!r}]"
        try:
            inspect.signature(function).bind(params, batch)
        except TypeError:
            raise refuse(field, function, "must take (params, batch)") from None
        except ValueError:  # functions not written in Python have no signature
            pass
        try:
            value = trace(
                field, lambda theta, batch: function(assemble(theta), batch), theta, batch
            )
        except KeyError as error:
            keys = ", ".join(batch) if isinstance(batch, Mapping) else "no names"
            raise refuse(field, error.args[0], f"no such name. A batch has {keys}") from None
        shape = getattr(value, "shape", None)
        if shape != (2,):
            expected = f"returns shape {shape} for a batch of 2: must be one number per example"
            raise refuse("metrics", name, expected)
