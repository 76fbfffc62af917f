"""The measurement of accuracy against ε: its table, the choice of settings, the scaled noise."""

import math

import pytest

from benchmarks import privacy
from fedpa.privacy import Mechanism, compute_epsilon

OUTCOME = privacy.Outcome(0.9, 0.4, 0.5, 1.0, 0.05, 100.0, 3.0)


def list_trials(epsilon=3.0):
    return list(privacy.list_trials("fedavg", epsilon, 10, privacy.CLIPS))


def test_what_is_written_is_read(tmp_path):
    one, other = list_trials()[0], list_trials(math.inf)[0]
    path = tmp_path / "table.csv"
    privacy.append(path, one, OUTCOME)
    privacy.append(path, other, OUTCOME)
    assert privacy.read(path) == {one: OUTCOME, other: OUTCOME}
    assert "population" in path.read_text().splitlines()[0]
    assert privacy.read(tmp_path / "none.csv") == {}


def test_the_least_finite_loss_is_chosen():
    tried = list_trials()
    losses = [math.nan, math.inf, *(0.3 - 0.1 * k for k in range(len(tried) - 2))]
    table = {t: OUTCOME._replace(loss=x) for t, x in zip(tried, losses, strict=True)}
    assert privacy.choose(table, tried) == tried[-1]


@pytest.mark.parametrize("method", privacy.METHODS)
def test_methods_are_built_private_and_plain(method):
    first, *others = privacy.list_trials(method, math.inf, 10, privacy.CLIPS)
    assert privacy.build(first).name != "private"
    assert all(privacy.build(one).settings() != privacy.build(first).settings() for one in others)


@pytest.mark.long
def test_the_noise_is_that_of_the_assumed_deployment():
    z = privacy.find_noise(8.0, 10)
    deployment = Mechanism(z, privacy.POPULATION, privacy.COHORT)
    assert 7.9 < compute_epsilon(deployment, 10, privacy.DELTA) <= 8.0
    private = privacy.build(list_trials(8.0)[0])
    simulated = private.settings()["noise_multiplier"] / privacy.CLIENTS
    assert simulated == pytest.approx(z / privacy.COHORT)
