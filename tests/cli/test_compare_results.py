"""What `fedpa compare` makes of its runs, which are made up here."""

import csv
import errno
import os
import re
from pathlib import Path

import pytest

from fedpa.cli.commands import compare
from fedpa.cli.main import main
from fedpa.training import run_directory
from tests.report.made_runs import made_run

WORDS = ["compare", "digits", "--methods", "fedavg,fedpa", "--seeds", "2", "--rounds", "12"]
WORDS += ["--burn-in-rounds", "5"]


@pytest.fixture(autouse=True)
def no_training(tmp_path, monkeypatch):
    """Its runs are there at once; FedPA's second seed ended after 8 rounds."""
    monkeypatch.chdir(tmp_path)

    def carried_out(planned, *_):
        for plan in planned:
            short = (plan.config.method, plan.config.seed) == ("fedpa", 1)
            rounds = 8 if short else plan.config.rounds
            made_run(plan.out, plan.config.method, plan.config.seed, rounds)
        return [run_directory.read_metrics(plan.out) for plan in planned]

    monkeypatch.setattr(compare, "carried_out", carried_out)


def page_words():
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", Path("cmp/report.html").read_text("utf-8")))


def test_table_and_page_compare_the_same_rounds(capsys):
    main([*WORDS, "--out", "cmp"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(at round 8 of 12)" in said
    assert "+0.0000" in said  # made with the same noise: at the same rounds they are the same
    fedavg, fedpa = csv.DictReader(Path("cmp/table.csv").read_text().splitlines())
    assert (fedavg["round"], fedpa["round"], fedpa["difference_round"]) == ("12", "8", "8")
    assert "FedPA[5] (at round 8 of 12)" in page_words()
    assert "+0.0000 ± 0.0000" in page_words()


def test_the_page_has_the_reference_of_the_table(capsys):
    main([*WORDS, "--reference", "fedpa", "--out", "cmp"])
    assert "less FedPA[5]" in page_words()
    assert "less FedAvg[5]" not in page_words()
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
