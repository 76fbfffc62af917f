"""The study of the switch: what its rows say, and its settings."""

import numpy as np
import pytest

from fedpa.experiments.config import resolve
from fedpa.experiments.studies import switch
from fedpa.experiments.studies.study import Settings, where
from fedpa.training.history import History
from fedpa.training.loop import Fit


def make_rows(title="problem", seeds=(0, 1), drop=0.5, later=0.0, slope=0.0):
    """FedAvg at loss 1; FedPA and the others lower by `drop` from the first round on.

    All fall by `slope` a round. FedAvg × 0.25 is best on validation.
    """
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
            own = about | {"branch": name, "quantity": "validation"}
            rows.append(own | {"value": 1.0 - (name == switch.QUARTER)})
            for t in range(-19 if name == switch.FEDAVG else 1, 61):
                value = 1.0 + seed - slope * t - (less if t > 0 else 0.0)
                of = about | {"branch": name, "round": t}
                rows.append(of | {"quantity": "loss", "value": value})
                rows.append(of | {"quantity": "metric", "value": 0.5 + less})
    return rows


def test_the_drop_is_from_before_the_switch_and_differences_are_paired():
    outcomes = switch.find_outcomes(make_rows())
    assert list(outcomes) == list(switch.BRANCHES)
    assert outcomes["FedPA"].drop == pytest.approx({0: 0.5, 1: 0.5})
    assert outcomes[switch.FEDAVG].drop == pytest.approx({0: 0.0, 1: 0.0})
    # Rounds −9 to 0 against 6 to 10, of a loss that falls by 0.01 a round.
    falling = switch.find_outcomes(make_rows(slope=0.01))
    assert falling[switch.FEDAVG].drop[0] == pytest.approx(0.01 * (8 + 4.5))
    assert falling["FedPA"].loss[0] == pytest.approx(0.5 - 0.01 * 50.5)
    mean, half = switch.difference(outcomes["mean"].loss, outcomes[switch.FEDAVG].loss)
    assert (mean, half) == pytest.approx((-0.5, 0.0), abs=1e-9)
    assert switch.difference({0: 1.0}, {0: 3.0, 1: 5.0}) == (-2.0, np.inf)


@pytest.mark.parametrize(
    ("drop", "later", "words"),
    [
        (0.5, 0.0, ["loss falls by 0.5000", "that of FedAvg × 0.25", "within seed noise"]),
        (0.5, 0.2, ["loss falls by 0.7000", "0.2000 ± 0.0000 below that of FedAvg × 0.25"]),
        (-0.5, -0.2, ["loss rises by 0.7000", "0.2000 ± 0.0000 above that of FedAvg × 0.25"]),
    ],
)
def test_what_is_concluded_follows_from_the_numbers(drop, later, words):
    said = switch.conclude(switch.find_outcomes(make_rows(drop=drop, later=later)))
    assert all(word in said for word in words)
    alone = switch.conclude(switch.find_outcomes(make_rows(seeds=(0,), drop=drop, later=later)))
    assert "one seed" in alone


def test_what_diverges_is_said_to_and_is_no_choice():
    outcomes = switch.find_outcomes(make_rows())
    nothing = {0: np.nan, 1: np.nan}
    outcomes[switch.QUARTER] = outcomes[switch.QUARTER]._replace(validation=nothing)
    assert "that of FedAvg × 0.5" in switch.conclude(outcomes)
    outcomes[switch.TUNED] = outcomes[switch.TUNED]._replace(loss=nothing)
    assert "diverged" in switch.conclude(outcomes)


def test_tables_and_figure_have_every_problem():
    rows = [*make_rows("a"), *make_rows("b", seeds=(0,))]
    found = switch.findings(rows)
    assert len(found) == 5
    assert found[0].row_count == len(switch.BRANCHES)
    assert "switch after round 90 to 91 (1 of 2 at the bound" in str(found[0].title)
    assert "r = 0.70" in "".join(map(str, found[0].columns[0].cells))
    assert len(switch.draw(rows).axes) == 6


@pytest.mark.parametrize("name", switch.PROBLEMS)
def test_every_problem_is_measured_whole(name, monkeypatch, tmp_path):
    """All branches, in their order, with runs that train nothing."""
    own, calls, kept = switch.PROBLEMS[name], [], []

    def run(config, out, branch=None, **options):
        config = resolve(config)
        calls.append((out.name, config, branch))
        first = 0 if branch is None else own.at_most
        last = own.at_most if "burn-in" in out.name else config.rounds
        values = {"train/delta_norm": 2.0, "valid/loss": 0.5, "eval/loss": 0.5}
        values |= {"eval/accuracy": 0.9}
        history = [{"round": t + 1} | values for t in range(last)]
        assert first < last
        return Fit(None, History(history), None, switch.AT_PLATEAU)

    monkeypatch.setattr(switch, "run", run)
    monkeypatch.setattr(switch, "_load", lambda title: None)
    told = lambda done, text: None  # noqa: E731
    settings = Settings(False, 3, 1, told, [name], runs=tmp_path, keep=kept.append)
    rows = switch.measure(settings)
    assert kept[-1] == rows
    assert switch.measure(settings._replace(kept=rows)) == rows
    assert list(switch.find_outcomes(rows)) == [b for b in switch.BRANCHES if b in own.branches]
    assert where(rows, branch=switch.MATCHED, quantity="rate")[0]["value"] == 1.0
    for place, config, branch in calls[1:]:
        assert config.rounds == own.rounds + (0 if branch is None else own.at_most)
        assert config.seed == (3 + switch.TUNING if place.startswith("rho-") else 3)
    by_rho = [place for place, *_ in calls if place.startswith("rho-")]
    assert len(by_rho) == (len(switch.RHOS) if switch.TUNED in own.branches else 0)
