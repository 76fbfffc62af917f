"""What `fedpa compare` makes of its runs, which are made up here."""

import csv
import errno
import math
import os
import re
import tomllib
from pathlib import Path

import pytest

from fedpa.errors import FedpaError
from fedpa.experiments.cli.main import main
from fedpa.experiments.comparison import comparison, tasks
from fedpa.experiments.comparison.comparison import Trial
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.methods import reads_setting
from fedpa.training.history import History
from fedpa.training.loop import Fit
from tests.experiments.report.made_runs import made_run

WORDS = ["compare", "digits", "--methods", "fedavg,fedpa", "--seeds", "2", "--rounds", "12"]
WORDS += ["--burn-in-rounds", "5"]
TRAINING = {name: getattr(tasks.TaskRun, name) for name in ("perform", "check")}


@pytest.fixture(autouse=True)
def no_training(tmp_path, monkeypatch):
    """Its runs are there at once; FedPA's second seed ended after 8 rounds.

    Those that choose rates find MIME best at a client rate of 0.5, the others where they are.
    """
    monkeypatch.chdir(tmp_path)
    ran = {}

    def perform(self, out, callbacks, branch):
        config = ran[out.name] = self.config
        short = (config.method, config.seed) == ("fedpa", 1)
        if not out.exists():
            more = {}
            if out.parent.name == "tuning":
                rate = next(name for name in tasks.RATES if name in _rates(config))
                wanted = 0.5 if config.method == "mime" else _rates(config)[rate]
                value = getattr(config.hyperparameters, rate)
                more = {"valid/accuracy": 1 - abs(math.log(value / wanted)) / 9}
            made_run(out, config.method, config.seed, 8 if short else config.rounds, more=more)
        return Fit(None, History(), None)

    monkeypatch.setattr(tasks.TaskRun, "perform", perform)
    monkeypatch.setattr(tasks.TaskRun, "check", lambda *_: None)  # what is there is made up
    return ran


def _rates(config):
    """The rate that is chosen, at the method's own value."""
    own = resolve(default_config("digits", config.method)).hyperparameters
    return {
        name: getattr(own, name)
        for name in tasks.RATES
        if reads_setting(config.method, own, name, [1.2345])
    }


def page_words():
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", Path("cmp/report.html").read_text("utf-8")))


def test_table_and_page_compare_the_same_rounds(capsys):
    main([*WORDS, "--out", "cmp"])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"\(at round 8 .*of 12\)", said)
    assert "+0.0000" in said  # made with the same noise: at the same rounds they are the same
    fedavg, fedpa = csv.DictReader(Path("cmp/table.csv").read_text().splitlines())
    assert (fedavg["round"], fedpa["round"], fedpa["difference_round"]) == ("12", "8", "8")
    assert "FedPA[5] (at round 8 of 12)" in page_words()
    assert "+0.0000 ± 0.0000" in page_words()


def test_the_page_has_the_reference_of_the_table(capsys):
    main([*WORDS, "--reference", "fedpa", "--out", "cmp"])
    assert "Δ vs FedPA[5]" in page_words()
    assert "Δ vs FedAvg[5]" not in page_words()
    fedavg, fedpa = csv.DictReader(Path("cmp/table.csv").read_text().splitlines())
    assert fedavg["difference"]
    assert not fedpa["difference"]


@pytest.mark.parametrize("name", ["table.csv", "table.tex", "curves.png", "report.html"])
def test_a_full_disk_is_one_line(name, capsys, monkeypatch):
    replace = os.replace

    def full(part, path):
        if Path(path) == Path("cmp") / name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(part, path)

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SystemExit) as leaving:
        main([*WORDS, "--out", "cmp"])
    assert leaving.value.code == 2
    assert capsys.readouterr().err == (
        "error: out = 'cmp': can't be written: No space left on device\n"
    )
    assert not list(Path("cmp").glob(f"{name}*"))


def test_each_method_runs_at_a_rate_of_its_own(no_training, capsys):
    words = ["compare", "digits", "--methods", "fedavg,fedadam,mime", "--rounds", "12"]
    words += ["--validation-share", "0.1"]
    main([*words, "--tune", "3,0.5,1", "--tune-rounds", "7", "--out", "cmp"])
    runs = {"fedavg-0", "fedadam-0", "mime-0"}
    chosen = {Path(f"cmp/{name}") for name in runs}
    assert all(path.is_dir() for path in chosen)
    compared = {config.method: config for config in no_training.values() if config.seed == 0}
    trials = sorted(path.name for path in Path("cmp/tuning").iterdir())
    assert trials == sorted(
        [f"{name}-{k}" for name in ("fedavg", "fedadam") for k in range(3)]
        + [f"mime-{k}" for k in range(5)]
    )
    tried = [
        tomllib.loads((Path("cmp/tuning") / name / "config.toml").read_text()) for name in trials
    ]
    assert {own["seed"] for own in tried} == {comparison.SEED}
    assert {own["rounds"] for own in tried} == {7}
    assert tomllib.loads(Path("cmp/comparison.toml").read_text())["tuning"] == {
        "fedavg": {"server_learning_rate": [0.5, 1.0, 3.0]},
        "fedadam": {"server_learning_rate": [0.005, 0.01, 0.03]},
        "mime": {"client_learning_rate": [0.025, 0.05, 0.15]},
    }
    assert compared["fedadam"].hyperparameters.server_learning_rate == 0.01
    assert compared["mime"].hyperparameters.client_learning_rate == 0.45
    assert (compared["mime"].seed, compared["mime"].rounds) == (0, 12)
    assert compared["mime"].task_options.eval_split == "test"
    said = capsys.readouterr().out
    said = " ".join(said.replace("\u00a0", " ").split())
    assert "FedAvg[5] server 0.5: 0.9230 1: 1.0000* 3: 0.8779" in said
    assert "0.45: 0.9883* 1.35: 0.8896" in said
    assert "*!" not in said


@pytest.mark.long
def test_rates_are_chosen_by_the_loss_if_told(capsys, monkeypatch):
    for name, function in TRAINING.items():
        monkeypatch.setattr(tasks.TaskRun, name, function)
    words = ["compare", "digits", "--methods", "fedavg", "--rounds", "3", "--epochs", "1"]
    words += ["--validation-share", "0.1", "--tune", "1,3,1e5", "--tune-by", "loss"]
    main([*words, "--out", "cmp", "--quiet"])
    said = " ".join(capsys.readouterr().out.replace("\u00a0", " ").split())
    assert "rates, by valid/loss" in said
    values = dict(re.findall(r"(\S+): ([\d.]+|–)\*", said))
    assert list(values) == ["3"]  # of so few rounds the larger step is better; the third diverges
    assert 1 < float(values["3"]) < 2.3
    with pytest.raises(SystemExit):  # a choice by another metric is another comparison
        main([*words[:-1], "accuracy", "--out", "cmp"])
    assert "by was 'valid/loss' and is 'valid/accuracy'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[:-3], "1,2", *words[-2:], "--out", "cmp"])
    assert "tuning.fedavg.server_learning_rate was" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words[:-1], "f1", "--out", "other"])
    assert "tune_by = 'f1': choose from accuracy, loss" in capsys.readouterr().err


def test_where_all_rates_diverge_lower_ones_are_tried():
    trials = [Trial(n, {"r": v}, None) for n, v in enumerate((1.0, 3.0, 9.0))]
    (further,) = comparison.find_next(trials, False).values()
    assert further == pytest.approx(0.333)
    trials.append(Trial(3, {"r": 0.333}, 0.2))
    (further,) = comparison.find_next(trials, False).values()
    assert further == pytest.approx(0.111)
    assert comparison.find_next([*trials, Trial(4, {"r": 0.111}, 0.1)], False) is None
    lower = [*trials, Trial(4, {"r": 0.111}, 0.1)]
    assert comparison.find_next(lower, True) == {"r": pytest.approx(0.037)}


def test_what_has_no_next_value_ends_where_it_is():
    whole = [Trial(n, {"epochs": v}, v) for n, v in enumerate((1, 5))]
    assert comparison.find_next(whole, False) == {"epochs": 25}
    assert comparison.find_next(whole, True) is None  # 0 epochs are none
    several = [Trial(0, {"a": 1.0, "b": 1.0}, 1.0), Trial(1, {"a": 2.0, "b": 1.0}, 2.0)]
    assert comparison.find_next(several, False) is None
    texts = [Trial(0, {"rho": "oas"}, 1.0), Trial(1, {"rho": 0.1}, 2.0)]
    assert comparison.find_next(texts, False) is None


def test_rates_are_not_chosen_on_test_nor_without_sampling(no_training, capsys):
    for words, says in [
        (["--tune", "0.5,1"], "no validation clients: give --validation-share 0.1"),
        (["--tune-rounds", "9"], "tune_rounds = 9: needs --tune"),
        (
            ["--tune", "1,2", "--tune-rounds", "1"],
            "tune_rounds = 1: none of them would sample for fedpa",
        ),
    ]:
        with pytest.raises(SystemExit):
            main([*WORDS, "--burn-in-rounds", "10", *words, "--out", "cmp"])
        assert says in capsys.readouterr().err
    main([*WORDS, "--tune", "1,2,3", "--tune-rounds", "6", "--validation-share", "0.1"])
    tried = [config for config in no_training.values() if config.seed == comparison.SEED]
    assert {
        config.hyperparameters.burn_in_rounds for config in tried if config.method == "fedpa"
    } == {2}  # of 6, as 5 of 12


def test_a_directory_alone_goes_on_with_its_comparison(capsys):
    main([*WORDS, "--out", "cmp"])
    before = Path("cmp/table.csv").read_bytes()
    Path("cmp/table.csv").unlink()
    main(["compare", "--out", "cmp", "--quiet"])
    assert Path("cmp/table.csv").read_bytes() == before
    with pytest.raises(SystemExit):
        main(["compare", "--out", "nowhere"])
    assert "contains no comparison to resume; name a task" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1", "0.3,1,x", "1,1", "0,1", "-1,2", "nan,1", "inf,1"])
def test_multiples_that_are_none_are_refused(text):
    with pytest.raises(FedpaError, match="tune = "):
        tasks.read_multiples(text)
