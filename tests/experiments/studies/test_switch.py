"""The study of the switch: what its rows say, and its settings."""

import numpy as np
import pytest

from fedpa.experiments.config import resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.studies import switch


def make_rows(title="problem", seeds=(0, 1), drop=0.5, later=0.0):
    """FedAvg at loss 1; FedPA and the others lower by `drop` from the first round on."""
    rows = []
    for seed in seeds:
        about = {"problem": title, "run": seed}
        rows += [
            about | {"branch": switch.FEDAVG, "quantity": "switch", "value": 90.0 + seed},
            about | {"branch": switch.FEDAVG, "quantity": "plateau", "value": float(seed > 0)},
            about | {"branch": switch.MATCHED, "quantity": "rate", "value": 0.7},
        ]
        for name in switch.BRANCHES:
            less = 0.0 if name == switch.FEDAVG else drop
            less += later if name == switch.TUNED else 0.0
            for t in range(-19 if name == switch.FEDAVG else 1, 61):
                value = 1.0 + seed - (less if t > 0 else 0.0)
                of = about | {"branch": name, "round": t}
                rows.append(of | {"quantity": "loss", "value": value})
                rows.append(of | {"quantity": "metric", "value": 0.5 + less})
    return rows


def test_the_drop_is_from_before_the_switch_and_differences_are_paired():
    outcomes = switch.find_outcomes(make_rows())
    assert list(outcomes) == list(switch.BRANCHES)
    assert outcomes["FedPA"].drop == pytest.approx({0: 0.5, 1: 0.5})
    assert outcomes[switch.FEDAVG].drop == pytest.approx({0: 0.0, 1: 0.0})
    mean, half = switch.difference(outcomes["mean"].loss, outcomes[switch.FEDAVG].loss)
    assert (mean, half) == pytest.approx((-0.5, 0.0), abs=1e-9)
    assert switch.difference({0: 1.0}, {0: 3.0, 1: 5.0}) == (-2.0, np.inf)


@pytest.mark.parametrize(
    ("drop", "later", "words"),
    [
        (0.5, 0.0, ["the loss drops", "within seed noise"]),
        (0.5, 0.2, ["the loss drops", "it is lower than that of FedAvg × 0.5"]),
        (-0.5, -0.2, ["does not drop", "it is higher than that of"]),
    ],
)
def test_what_is_concluded_follows_from_the_numbers(drop, later, words):
    said = switch.conclude(switch.find_outcomes(make_rows(drop=drop, later=later)))
    assert all(word in said for word in words)
    alone = switch.conclude(switch.find_outcomes(make_rows(seeds=(0,), drop=drop, later=later)))
    assert "one seed" in alone


def test_tables_and_figure_have_every_problem():
    rows = [*make_rows("a"), *make_rows("b", seeds=(0,))]
    found = switch.findings(rows)
    assert len(found) == 5
    assert found[0].row_count == len(switch.BRANCHES)
    assert "switch after round 90 to 91 (1 of 2 at the bound" in str(found[0].title)
    assert "r = 0.70" in "".join(map(str, found[0].columns[0].cells))
    assert len(switch.draw(rows).axes) == 6


@pytest.mark.parametrize("name", switch.PROBLEMS)
def test_every_branch_of_every_problem_can_be_run(name):
    own = switch.PROBLEMS[name]
    assert set(own.branches) <= set(switch.BRANCHES)
    for label in own.branches:
        branch = switch.BRANCHES[label]
        config = switch.configure(own, branch, seed=3, switch=own.at_most, shared="burn-in")
        settings = {"at_switch_rate": 0.7} if label == switch.MATCHED else {}
        config = resolve(replace_fields(config, **settings))
        assert (config.method, config.seed) == (branch.method, 3)
        assert config.rounds == own.rounds + (0 if branch.is_fresh else own.at_most)
