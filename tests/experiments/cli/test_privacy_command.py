"""Privacy on the command line: what noise is needed, and what can't be private."""

import contextlib
import json

import pytest

from fedpa.experiments.cli.main import main
from fedpa.experiments.config import as_table, default_config, from_table, resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.privacy import Mechanism, compute_epsilon
from tests.refusals import refused

PRIVATE = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
WORDS = ["--clip", "1", "--noise-multiplier", "1", "--delta", "0.001", "--accountant", "rdp"]


def configure(method="fedavg", **changes):
    return resolve(replace_fields(default_config("digits", method), **{**PRIVATE, **changes}))


def say(capsys, *words):
    """What a command prints; of one that is refused, its error."""
    with contextlib.suppress(SystemExit):
        main(list(words))
    out, err = capsys.readouterr()
    return out or err


POPULATION = ["--clients", "1000", "--cohort", "50", "--rounds", "40", "--accountant", "rdp"]


def test_it_computes_the_noise_and_its_inverse(capsys):
    said = say(capsys, "privacy", *POPULATION, "--epsilon", "2", "--delta", "1e-4")
    z = float(said.split("noise multiplier")[1].split()[0])
    spent = compute_epsilon(Mechanism(z, 1000, 50, accountant="rdp"), 40, 1e-4)
    assert 1.98 < spent <= 2
    back = say(capsys, "privacy", *POPULATION, "--noise-multiplier", str(z), "--delta", "1e-4")
    assert f"{spent:.4g}" in back
    words = ["--noise-multiplier", "2", "--delta", "1e-4", "--simulated-cohort", "10"]
    assert "noise multiplier 0.4;" in say(capsys, "privacy", *POPULATION, *words)


@pytest.mark.parametrize(
    ("words", "anchor"),
    [
        (["--epsilon", "2", "--delta", "0.001"], "delta = 0.001"),
        (["--delta", "1e-4"], "epsilon = None"),
        (["--epsilon", "-1", "--delta", "1e-4"], "epsilon = -1.0"),
        (["--epsilon", "2", "--noise-multiplier", "1", "--delta", "1e-4"], "epsilon = 2.0"),
        (["--epsilon", "2", "--delta", "1e-4", "--cohort", "1001"], "cohort = 1001"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys, words, anchor):
    assert f"error: {anchor}:" in say(capsys, "privacy", *POPULATION, *words)


def test_a_run_records_its_privacy_and_resumes(capsys, tmp_path):
    out = tmp_path / "run"
    words = ["digits", "--method", "fedavg", "--rounds", "1", "--epochs", "1", "--out", str(out)]
    assert "delta = 0.001" not in say(capsys, "run", *words, *WORDS)
    say(capsys, "resume", str(out), "--rounds", "2")
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["privacy/releases"] for record in records] == [1, 2]
    mechanism = Mechanism(1.0, 100, 20, accountant="rdp")
    spent = [compute_epsilon(mechanism, t, 1e-3) for t in (1, 2)]
    assert [record["privacy/epsilon"] for record in records] == pytest.approx(spent)
    page = tmp_path / "page.html"
    say(capsys, "report", str(out), "--out", str(page), "--no-figures")
    text = page.read_text()
    for shown in ("Privacy spent", "Not noised, so not private", "private FedAvg[1]", "rdp"):
        assert shown in text
    assert "privacy/epsilon = " in say(capsys, "posterior", str(out))


def test_a_dry_run_says_what_will_be_spent(capsys):
    words = ["digits", "--method", "fedavg", "--rounds", "3", "--epochs", "1", "--dry-run"]
    said = say(capsys, "run", *words, *WORDS)
    spent = compute_epsilon(Mechanism(1.0, 100, 20, accountant="rdp"), 3, 1e-3)
    assert f"privacy: ε = {spent:.4g} at δ = 0.001 after 3 rounds" in said


def test_a_delta_of_one_in_a_hundred_clients_needs_force(capsys, tmp_path):
    words = ["digits", "--method", "fedavg", "--out", str(tmp_path / "run"), *WORDS]
    assert "delta = 0.01" in say(capsys, "run", *words, "--delta", "0.01")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "anchor"),
    [
        ("scaffold", "method = 'scaffold'"),
        ("mime", "method = 'mime'"),
        ("centralized", "method = 'centralized'"),
    ],
)
def test_methods_are_refused_by_name(method, anchor):
    with refused(anchor):
        configure(method)


@pytest.mark.parametrize(
    ("changes", "anchor"),
    [
        ({"clip": None}, "noise_multiplier = 1.0"),
        ({"noise_multiplier": None}, "noise_multiplier = None"),
        ({"delta": None}, "delta = None"),
        ({"clip": -1.0}, "clip = -1.0"),
        ({"clip_rate": 0.1}, "clip_rate = 0.1"),
        ({"bands": 2}, "bands = 2"),
    ],
)
def test_options_are_checked_before_anything_runs(changes, anchor):
    with refused(anchor):
        configure(**changes)


def test_a_private_configuration_is_read_back_and_a_plain_one_has_no_table():
    config = configure(clip_quantile=0.4, force=True)
    assert resolve(from_table(as_table(config), "here")) == config
    assert config.hyperparameters.weighting == "uniform"
    assert configure(weight_cap=30.0).hyperparameters.weighting == "examples"
    assert "privacy" not in as_table(resolve(default_config("digits", "fedavg")))
