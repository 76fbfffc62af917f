"""A federation dealt anew has the same examples, clients of equal sizes, and few labels each."""

import numpy as np
import pytest

import fedpa
from fedpa.data import from_mapping
from fedpa.data.partition import deal_by_label
from fedpa.experiments.tasks import TaskOptions
from fedpa.experiments.tasks.task import check_task_options, task_named


def writers(num=30, labels=10):
    """Each has as many of every label; `x` tells whose it was."""
    return from_mapping(
        {
            f"writer-{n:02d}": {"x": np.full(2 * labels, n), "y": np.repeat(np.arange(labels), 2)}
            for n in range(num)
        }
    )


def test_examples_are_the_same_and_labels_are_not():
    before = writers()
    after = deal_by_label(before, "y", 0.1, seed=0)
    pairs = lambda data: sorted(  # noqa: E731
        (int(x), int(y))
        for name in data.ids
        for x, y in zip(*data.examples(name).values(), strict=True)
    )
    assert pairs(after) == pairs(before)
    assert len(after.ids) == len(before.ids)
    assert {len(after.examples(name)["y"]) for name in after.ids} == {20}
    labels = [len(np.unique(after.examples(name)["y"])) for name in after.ids]
    assert np.median(labels) <= 5 < 10
    again = deal_by_label(before, "y", 0.1, seed=0)
    other = deal_by_label(before, "y", 0.1, seed=1)
    same = lambda one: all(  # noqa: E731
        np.array_equal(after.examples(name)["x"], one.examples(name)["x"]) for name in after.ids
    )
    assert same(again)
    assert not same(other)


def test_digits_can_hold_out_clients_for_validation():
    load = task_named("digits").load
    whole, parted = load(TaskOptions()), load(TaskOptions(validation_share=0.2))
    assert whole.validation is None
    assert (len(parted.clients.ids), len(parted.validation.ids)) == (80, 20)
    assert sorted(parted.clients.ids + parted.validation.ids) == sorted(whole.clients.ids)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_concentration_that_is_none_is_refused(value):
    with pytest.raises(fedpa.FedpaError, match="label_skew = "):
        check_task_options("emnist", TaskOptions(label_skew=value), ("label_skew",))
