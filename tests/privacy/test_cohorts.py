"""Cohorts are drawn as the accounting says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa.privacy import Ledger, draw_cohort, take_turns
from fedpa.privacy.accounting import find_separation
from tests.refusals import refused

IDS = [f"client-{k}" for k in range(20)]


@given(size=st.integers(1, 25), seed=st.integers(0, 2**32 - 1))
def test_fixed_cohorts_have_one_size_and_no_client_twice(size, seed):
    drawn = draw_cohort("fixed", IDS, size, np.random.default_rng(seed).random(20))
    assert len(drawn) == len(set(drawn)) == min(size, 20)


def test_poisson_takes_each_client_by_itself():
    rng = np.random.default_rng(0)
    taken = np.array(
        [
            [i in draw for i in IDS]
            for draw in (set(draw_cohort("poisson", IDS, 2, rng.random(20))) for _ in range(4000))
        ]
    )
    assert np.abs(taken.mean(axis=0) - 0.1).max() < 5 * np.sqrt(0.09 / 4000)
    sizes = taken.sum(axis=1)
    assert abs(sizes.var() - 20 * 0.09) < 0.2  # binomial, not fixed
    assert (sizes == 0).any()
    assert draw_cohort("poisson", IDS, 30, rng.random(20)) == IDS


@given(clients=st.integers(1, 20), size=st.integers(1, 25))
def test_turns_are_far_enough_apart(clients, size):
    """The rounds of a client are at least ⌊N/m⌋ apart, which is what it is counted by."""
    ids, order = IDS[:clients], np.random.default_rng(clients).permutation(clients)
    last = dict.fromkeys(ids, -(10**9))
    least = find_separation(clients, size)
    for t in range(30):
        cohort = take_turns(ids, size, t, order)
        assert len(cohort) == len(set(cohort)) == min(size, clients)
        for name in cohort:
            assert t - last[name] >= least
            last[name] = t


def test_a_ledger_counts_every_release_and_names_no_client(tmp_path):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    assert ledger.count() == 0
    for t in (1, 2, 2, 3):
        ledger.record(t)
    assert Ledger(ledger.path).count() == 4
    assert "client" not in ledger.path.read_text()
    with ledger.path.open("ab") as file:
        file.write(b'{"rou')  # cut short, so its noise was never drawn
    ledger.record(4)
    assert ledger.count() == 5
    (tmp_path / "directory").mkdir()
    with refused("directory"):
        Ledger(tmp_path / "directory").record(1)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_a_ledger_draws_another_cohort_every_time(tmp_path, sampling):
    ledger = Ledger(tmp_path / "privacy.jsonl")
    drawn = [tuple(ledger.draw_cohort(sampling, IDS, 8)) for _ in range(6)]
    assert len(set(drawn)) > 1
