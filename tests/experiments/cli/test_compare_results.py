"""What `fedpa compare` makes of its runs, which are made up here."""

import csv
import errno
import math
import os
import re
from pathlib import Path

import pytest

from fedpa.errors import FedpaError
from fedpa.experiments import comparison
from fedpa.experiments.cli.commands import compare
from fedpa.experiments.cli.main import main
from fedpa.experiments.sweeps.search import Trial
from tests.experiments.report.made_runs import made_run

WORDS = ["compare", "digits", "--methods", "fedavg,fedpa", "--seeds", "2", "--rounds", "12"]
WORDS += ["--burn-in-rounds", "5"]


@pytest.fixture(autouse=True)
def no_training(tmp_path, monkeypatch):
    """Its runs are there at once; FedPA's second seed ended after 8 rounds."""
    monkeypatch.chdir(tmp_path)

    def carry_out(compared, *_):
        for plan in comparison.plan_runs(compared)[1]:
            short = (plan.config.method, plan.config.seed) == ("fedpa", 1)
            rounds = 8 if short else plan.config.rounds
            if not plan.out.exists():
                made_run(plan.out, plan.config.method, plan.config.seed, rounds)

    monkeypatch.setattr(compare, "carry_out", carry_out)
    monkeypatch.setattr(compare, "check_runs", lambda *_: None)  # what is there is made up


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


@pytest.mark.parametrize("name", ["table.csv", "curves.png", "report.html"])
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


@pytest.fixture(name="pretended")
def _pretended(monkeypatch):
    """Sweeps that end at once: MIME is best at a client rate of 0.5, the others where they are."""
    seen = {}

    def sweep(settings, out, problem, *, jobs, watch):
        ((rate, values),) = settings.space.items()
        seen.setdefault(out.name, settings)
        wanted = 0.5 if out.name.startswith("mime") else settings.base.hyperparameters
        wanted = wanted if isinstance(wanted, float) else getattr(wanted, rate)
        trials = [
            Trial(n, {rate: value}, "finished", 1 - abs(math.log(value / wanted)) / 9, {})
            for n, value in enumerate(values)
        ]
        watch.begin(trials[0], False)
        return trials

    monkeypatch.setattr(comparison, "sweep", sweep)
    return seen


def test_each_method_runs_at_a_rate_of_its_own(pretended, capsys, monkeypatch):
    ran = {}
    carried_out = compare.carry_out

    def remembered(compared, *rest):
        ran.update({config.method: config for config in compared.configs.values()})
        return carried_out(compared, *rest)

    monkeypatch.setattr(compare, "carry_out", remembered)
    words = ["compare", "digits", "--methods", "fedavg,fedadam,mime", "--rounds", "12"]
    words += ["--validation-share", "0.1"]
    main([*words, "--tune", "3,0.5,1", "--tune-rounds", "7", "--out", "cmp"])
    assert {s.base.seed for s in pretended.values()} == {comparison.SEED}
    assert {s.base.rounds for s in pretended.values()} == {7}
    assert {method: dict(s.space) for method, s in pretended.items()} == {
        "fedavg": {"server_learning_rate": (0.5, 1.0, 3.0)},
        "fedadam": {"server_learning_rate": (0.005, 0.01, 0.03)},
        "mime": {"client_learning_rate": (0.025, 0.05, 0.15)},
        "mime+1": {"client_learning_rate": (0.45,)},
        "mime+2": {"client_learning_rate": (1.35,)},
    }
    assert ran["fedadam"].hyperparameters.server_learning_rate == 0.01
    assert ran["mime"].hyperparameters.client_learning_rate == 0.45
    assert (ran["mime"].seed, ran["mime"].rounds) == (0, 12)
    assert ran["mime"].task_options.eval_split == "test"
    said = capsys.readouterr().out
    said = " ".join(said.replace("\u00a0", " ").split())
    assert "FedAvg[5] server 0.5: 0.9230 1: 1.0000* 3: 0.8779" in said
    assert "0.45: 0.9883* 1.35: 0.8896" in said
    assert "*!" not in said


def test_rates_are_chosen_by_the_loss_if_told(capsys):
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
    assert "by was 'loss' and is not set" in capsys.readouterr().err
    main(["sweep", "--out", "cmp/tuning/fedavg"])
    assert "−valid/loss by hyperparameter" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*words[:-1], "f1", "--out", "other"])
    assert "tune_by = 'f1': choose from accuracy, loss" in capsys.readouterr().err


def test_where_all_rates_diverge_lower_ones_are_tried():
    trials = [Trial(n, {"r": v}, "finished", None, {}) for n, v in enumerate((1.0, 3.0, 9.0))]
    assert comparison.find_next_rate(trials, "r") == pytest.approx(0.333)
    found = Trial(3, {"r": 0.333}, "finished", 0.2, {})
    assert comparison.find_next_rate([found, *trials], "r") == pytest.approx(0.111)
    better = Trial(4, {"r": 0.111}, "finished", 0.1, {})
    assert comparison.find_next_rate([better, found, *trials], "r") is None


def test_rates_are_not_chosen_on_test_nor_without_sampling(pretended, capsys):
    for words, says in [
        (["--tune", "0.5,1"], "no validation clients to choose on: give --validation-share 0.1"),
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
    assert pretended["fedpa"].base.hyperparameters.burn_in_rounds == 2  # of 6, as 5 of 12


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
        comparison.read_multiples(text)
