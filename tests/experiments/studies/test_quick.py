"""Every study in quick mode, by its command, shows the directions that full size has shown."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedpa.experiments.cli.commands import study as command
from fedpa.experiments.studies import bias_variance, switch, toy
from fedpa.experiments.studies.study import distinct, read_csv, studies, where

STUDIES = Path(__file__).parents[3] / "docs" / "studies"


def final(rows, problem, method):
    found = where(rows, problem=problem, method=method, quantity="final")
    return float(np.mean([row["value"] for row in found]))


def check_toy(rows):
    tuned = {result.method: result.tuned for result in toy.results(rows)}
    first = {result.method: result.by_rate[result.rate] for result in toy.results(rows)}
    # The numbers of an independent implementation on the same problem.
    for method, value in {
        "FedAvg-10": 0.20,
        "FedAvg-100": 2.05,
        "FedPA-IASG-10": 1.59,
        "FedPA-IASG-100": 0.39,
    }.items():
        assert first[method] == pytest.approx(value, rel=0.1), method
    # More local steps bias FedAvg, more samples bring FedPA closer, whichever the sampler.
    assert tuned["FedAvg-10"] < tuned["FedAvg-100"] < tuned["FedAvg-1100"]
    assert tuned["FedPA-IASG-100"] < 0.5 * tuned["FedPA-IASG-10"]
    assert tuned["FedPA-exact-100"] < 0.5 * tuned["FedPA-exact-10"]
    assert tuned["FedPA-exact-100"] < 0.5 * tuned["FedPA-IASG-100"]
    # At equal local steps FedPA is far closer than FedAvg; the same samples' mean is not.
    assert tuned["FedPA-IASG-100"] < 0.2 * tuned["FedAvg-1100"]
    assert tuned["mean-IASG-100"] > 0.8 * tuned["FedAvg-1100"]


def check_bias_variance(rows):
    grown = {
        (dim, noise): bias_variance.ends(where(rows, dim=dim, noise=noise), "fixed ρ", "bias")
        for dim in distinct(rows, "dim")
        for noise in bias_variance.NOISES
    }
    # FedAvg's variance falls with local steps; without label noise FedPA's bias does not.
    assert all(bias_variance.holds(rows, "FedAvg", "variance", -1).values())
    for dim in (10, 100):
        first, last = grown[dim, 0.0]
        assert last > 1.3 * first
    # There it is the longer step: the control has it to within a percent.
    for dim in (10, 100):
        at = where(rows, dim=dim, noise=0.0)
        ours, control = (
            bias_variance.ends(at, name, "bias")[1] for name in ("fixed ρ", "mean-scaled")
        )
        assert ours == pytest.approx(control, rel=0.02)
    # Calibrated, with many samples and as much noise as the model says, it is the covariance.
    at = where(rows, dim=10, noise=1.0)
    calibrated = bias_variance.ends(at, "calibrated, fixed ρ", "bias")[1]
    assert calibrated < 0.3 * bias_variance.ends(at, "fixed ρ", "bias")[1]


def check_ess(rows):
    def mean(quantity, **columns):
        return float(np.mean([r["value"] for r in where(rows, quantity=quantity, **columns)]))

    # Exact samples: ℓ (3/4)^{d/2}, 24 of 100 at d = 10; next to nothing at d = 100.
    assert 15 < mean("kish_exact", dim=10) < 35
    assert mean("kish_exact", dim=100) < 5
    # Too large a rate diverges, and is shown as that.
    for dim in (10, 100, 1000):
        largest = max(distinct(where(rows, panel="c", dim=dim), "learning_rate"))
        assert mean("diverged", panel="c", dim=dim, learning_rate=largest) == 1.0
    # More steps per sample: less correlated.
    steps = sorted(distinct(where(rows, panel="b", dim=10), "steps_per_sample"))
    few, many = (
        mean("autocorrelation_median", panel="b", dim=10, steps_per_sample=k)
        for k in (steps[0], steps[-1])
    )
    assert many > 1.5 * few


def check_timing(rows):
    """Times are not for tests: that all forms give one delta is."""
    assert {"gram", "recurrence"} <= set(distinct(rows, "form"))
    assert all(row["value"] < 1e-3 for row in where(rows, quantity="delta_error"))
    assert max(distinct(rows, "dim")) >= 1_000


def check_correction(rows):
    # The oracle arrives; FedAvg and the mean stop at the same distance.
    assert final(rows, "least squares", "oracle") < 0.01
    biased = final(rows, "least squares", "FedAvg")
    assert biased > 1.0
    assert final(rows, "least squares", "mean") == pytest.approx(biased, rel=0.1)
    # With samples of the true posterior the covariance brings FedPA closer than their mean; with
    # IASG's it does nothing, and calibrating their scale does harm.
    ours, control = (final(rows, "least squares", f"{m} exact T=1 ×√n") for m in ("FedPA", "mean"))
    assert ours < 0.7 * control
    iasg = final(rows, "least squares", "FedPA ρ=1")
    assert iasg == pytest.approx(biased, rel=0.05)
    assert final(rows, "least squares", "FedPA ρ=1, calibrated") > 1.1 * iasg


def check_switch(rows):
    """At the plateau the tuned FedPA is where FedAvg at a lower rate is."""
    outcomes = switch.find_outcomes(rows)
    assert list(outcomes) == list(switch.BRANCHES)
    lower = min(np.mean([*outcomes[name].loss.values()]) for name in switch.CUTS)
    ours = np.mean([*outcomes[switch.TUNED].loss.values()])
    assert ours == pytest.approx(lower, rel=0.05)
    # The mean of iterates is a shorter step.
    assert all(0.5 < row["value"] < 0.95 for row in where(rows, quantity="rate"))


CHECKS = {
    "bias-variance": check_bias_variance,
    "correction": check_correction,
    "ess": check_ess,
    "switch": check_switch,
    "timing": check_timing,
    "toy": check_toy,
}


# Half a minute and more each. Their parts have tests of their own.
@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_quick(name, tmp_path, capsys):
    command.main([name, "--quick", "--out", str(tmp_path / "out")], Console(width=80))
    out = tmp_path / "out"
    rows = read_csv(out / f"{name}.csv")
    assert set(rows[0]) >= {"quantity", "value", "seed", "size", "versions"}
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    if name == "toy":
        assert (out / "toy.gif").read_bytes().startswith(b"GIF89a")
    printed = capsys.readouterr().out
    assert "written to" in printed
    assert max(map(len, printed.splitlines()[:-3])) <= 100
    CHECKS[name](rows)


def test_every_study_is_checked_and_shown():
    assert set(CHECKS) == set(studies())
    page = (STUDIES.parent / "studies.md").read_text()
    for name in CHECKS:
        assert f"studies/{name}/{name}.png" in page
        assert (STUDIES / name / f"{name}.pdf").exists()
