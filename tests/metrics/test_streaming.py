"""Evaluation by streaming gives what all examples at once would give, overall and by client."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.data import FederatedData, from_mapping
from fedpa.errors import DataError
from fedpa.metrics.metric import Counts, Metric
from fedpa.metrics.streaming import compute_percentiles, make_evaluator


def measure(params, batch):
    x = params * batch["x"]
    return Counts({"x": x, "n": jnp.ones_like(x)}, {"both": jnp.stack([x, 2 * x], axis=1)})


def values(sums):
    return {"mean": sums["x"] / sums["n"] if sums["n"] else float("nan")}


METRIC = Metric(measure, values, lambda vectors: {"twice": float(vectors["both"][1])})


def federation(sizes):
    start = np.cumsum([0, *sizes])
    return {
        f"{i:03d}": {"x": np.arange(start[i], start[i] + n).astype(np.float32)}
        for i, n in enumerate(sizes)
    }


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any),
    st.integers(1, 12),
    st.integers(1, 50) | st.none(),
)
def test_batches_change_nothing(sizes, batch_size, most):
    clients = federation(sizes)
    found = make_evaluator(METRIC, from_mapping(clients), batch_size, most)(jnp.asarray(2.0))
    order = np.random.default_rng(0).permutation(len(sizes)).tolist()
    left, taken = most, {}
    for place in order:
        taken[place] = clients[f"{place:03d}"]["x"][:left]
        left = None if left is None else left - len(taken[place])
    x = np.concatenate(list(taken.values()))
    assert found.values["mean"] == pytest.approx(2 * x.mean())
    assert found.values["twice"] == pytest.approx(4 * x.sum())
    assert found.examples == len(x)
    own = [2 * taken[place].mean() for place in sorted(taken) if len(taken[place])]
    means = found.by_client["mean"]
    assert means[~np.isnan(means)].tolist() == pytest.approx(own)
    assert found.clients == len(own)


def test_a_second_evaluation_reads_nothing():
    clients, read = federation([3, 4]), []

    def examples(name):
        read.append(name)
        return clients[name]

    data = FederatedData(list(clients), lambda name: len(clients[name]["x"]), examples)
    evaluate = make_evaluator(METRIC, data, 2, most=99)
    first = evaluate(jnp.asarray(1.0))
    assert sorted(read) == ["000", "001"]
    assert evaluate(jnp.asarray(1.0)).values == first.values
    assert len(read) == 2


def test_one_program_for_all_batches(monkeypatch):
    traced = []

    def counting(params, batch):
        traced.append(1)
        return measure(params, batch)

    evaluate = make_evaluator(
        METRIC._replace(measure=counting), from_mapping(federation([7, 2, 8])), 4
    )
    for scale in (1.0, 2.0):
        evaluate(jnp.asarray(scale))
    assert len(traced) == 1


def test_fewer_examples_than_announced_are_an_error():
    clients = federation([3])
    data = FederatedData(["000"], lambda name: 4, clients.__getitem__)
    with pytest.raises(DataError, match="client '000' has 3 examples where 4 were announced"):
        make_evaluator(METRIC, data, 2)(jnp.asarray(1.0))


def test_distribution_over_clients():
    found = make_evaluator(METRIC, from_mapping(federation([1] * 11)), 4)(jnp.asarray(1.0))
    assert compute_percentiles(found, ["mean"]) == {
        "mean_p10": 1.0,
        "mean_p50": 5.0,
        "mean_p90": 9.0,
    }
    alone = make_evaluator(METRIC, from_mapping(federation([5])), 4)(jnp.asarray(1.0))
    assert compute_percentiles(alone, ["mean"]) == {}


def test_nobody_to_evaluate_on_is_an_error():
    data = FederatedData(["a"], lambda name: 0, lambda name: {"x": np.zeros(0, np.float32)})
    with pytest.raises(DataError, match="none of the 1 clients to evaluate on has an example"):
        make_evaluator(METRIC, data, 2)


def test_large_federations_are_not_kept(monkeypatch):
    monkeypatch.setattr("fedpa.metrics.streaming.KEPT_UP_TO", 10)
    clients, read = federation([3, 4]), []
    data = FederatedData(
        list(clients), lambda name: len(clients[name]["x"]), lambda n: read.append(n) or clients[n]
    )
    evaluate = make_evaluator(METRIC, data, 2, most=99)
    assert evaluate(jnp.asarray(1.0)).values == evaluate(jnp.asarray(1.0)).values
    assert len(read) == 4
