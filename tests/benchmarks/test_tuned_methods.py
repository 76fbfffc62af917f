"""The comparison of tuned methods: its table, the choice of rates, paired leads."""

import math

import numpy as np
import pytest

from benchmarks.tuned_methods import (
    COMPARISONS,
    METHODS,
    Point,
    append,
    best,
    build,
    compare_seeds,
    describe_target,
    exclude_compiling,
    read,
    summarize,
    trials,
)

NAME = "emnist-skew-mlp"


def point(place, accuracy, loss=1.0):
    return Point(place, accuracy, loss, 2.0 * place, 0.1 * place)


def test_what_is_written_is_read(tmp_path):
    one, other = list(trials(NAME, "fedavg"))[:2]
    append(tmp_path / "table.csv", {one: [point(2, 0.5), point(4, 0.75)]})
    append(tmp_path / "table.csv", {other: [point(2, 0.25)]})
    table = read(tmp_path / "table.csv")
    assert list(table) == [one, other]
    assert [p.accuracy for p in table[one]] == [0.5, 0.75]
    assert read(tmp_path / "none.csv") == {}


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_method_has_as_many_trials_and_is_built(name):
    tried = [list(trials(name, method)) for method in COMPARISONS[name].servers]
    assert len({len(each) for each in tried}) == 1
    assert len(set(tried[0])) == len(tried[0])
    assert all(callable(build(each[-1])) for each in tried)


def test_the_least_finite_loss_is_chosen():
    tried = list(trials(NAME, "fedadam"))
    losses = [math.nan, math.inf, 0.3, *[0.2] * (len(tried) - 4), 0.1]
    table = {t: [point(75, 0.9, loss)] for t, loss in zip(tried, losses, strict=True)}
    assert best(table, NAME, "fedadam") == tried[-1]


def test_tags_are_chosen_by_what_is_compared():
    tried = list(trials("tags", "fedadam"))
    recalls = (0.1, 0.3, 0.2, math.nan)
    table = {t: [point(75, r, r)] for t, r in zip(tried, recalls, strict=True)}
    assert best(table, "tags", "fedadam") == tried[1]


def test_leads_are_paired_and_targets_need_all_runs():
    ours, theirs = {0: 0.9, 1: 0.8}, {1: 0.75, 0: 0.85, 2: 0.1}
    assert compare_seeds(ours, theirs) == "+0.0500 ± 0.0000"
    assert compare_seeds({0: 0.9}, theirs) == "–"
    runs = [[point(2, 0.5), point(4, 0.9)], [point(2, 0.95)]]
    assert describe_target(runs, 0.9) == "3, 6 MB"
    assert describe_target(runs, 0.94) == "1 of 2"


def test_the_last_tenth_counts():
    points = [point(i, i / 100) for i in range(1, 31)]
    assert summarize(points).accuracy == pytest.approx(np.mean([0.28, 0.29, 0.30]))
    assert {method for c in COMPARISONS.values() for method in c.servers} == set(METHODS)


def test_rounds_that_compile_count_as_the_others_of_their_phase():
    took = [("a", 9.0), ("b", 8.0), ("a", 1.0), ("b", 2.0), ("a", 3.0), ("c", 5.0)]
    history = [{"phase": phase, "seconds": seconds} for phase, seconds in took]
    assert exclude_compiling(history) == [2.0, 2.0, 1.0, 2.0, 3.0, 5.0]
