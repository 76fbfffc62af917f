"""What every study has in common: rows as CSV, the command, and what it refuses."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fedpa.experiments.cli.commands import study as command
from fedpa.experiments.cli.main import main
from fedpa.experiments.report.bootstrap import interval_of_mean
from fedpa.experiments.report.figures import new_figure
from fedpa.experiments.report.looks import COLOURS, PLACES, choose_look
from fedpa.experiments.studies import study as studies_module
from fedpa.experiments.studies.study import (
    Study,
    as_csv,
    distinct,
    draw_means,
    read_csv,
    studies,
    where,
)

ROOT = Path(__file__).parents[3]
NAMES = ["bias-variance", "correction", "ess", "switch", "timing", "toy"]


def tiny(calls=None):
    """A study of two values, one of them a column left empty."""

    def measure(settings):
        if calls is not None:
            calls.append(settings)
        settings.tell(0.5, "half")
        return [
            {"method": "a", "quantity": "q", "value": 1 / 3},
            {"method": "b", "round": 2, "quantity": "q", "value": float("inf")},
        ]

    return Study(
        summary="two values",
        columns=("method", "round"),
        knob="seeds",
        repeats=(5, 2),
        measure=measure,
        draw=lambda rows: new_figure(1.0, 1.0),
        findings=lambda rows: [f"{len(rows)} rows"],
        extras=lambda rows: {"tiny.txt": b"more"},
    )


@pytest.fixture
def only_tiny(monkeypatch):
    calls = []
    found = {"tiny": tiny(calls), "tinier": tiny(calls)}
    monkeypatch.setattr(studies_module, "studies", lambda: found)
    monkeypatch.setattr(command, "studies", lambda: found)
    return calls


def run(*words):
    command.main(words, Console(width=100))


def refused(capsys, *words):
    with pytest.raises(SystemExit) as leaving:
        main(["study", *words])
    assert leaving.value.code == 2
    return capsys.readouterr().err


def test_the_papers_studies_are_there():
    assert list(studies()) == NAMES


def test_rows_survive_the_csv(tmp_path):
    path = tmp_path / "tiny.csv"
    path.write_text(as_csv(tiny(), tiny().measure(_settings()), seed=7, quick=True))
    rows = read_csv(path)
    assert rows[0]["value"] == pytest.approx(1 / 3, rel=1e-4)
    assert rows[1] == rows[1] | {"method": "b", "round": 2, "value": np.inf}
    assert "round" not in rows[0]
    assert {(r["seed"], r["size"]) for r in rows} == {(7, "quick")}
    assert "jax" in rows[0]["versions"]
    assert where(rows, method="b") == rows[1:]
    assert where(rows, round=None) == rows[:1]
    assert distinct(rows, "method") == ["a", "b"]


def _settings():
    return studies_module.Settings(True, 0, 1, lambda fraction, text: None)


def test_a_column_the_study_does_not_name_is_refused():
    with pytest.raises(ValueError, match="colour"):
        as_csv(tiny(), [{"colour": "red", "quantity": "q", "value": 1.0}], seed=0, quick=False)


def test_bands_over_seeds_are_the_calibrated_intervals():
    """Those of the reports: five seeds are covered by a plain percentile band 83 % of the time."""
    values = [0.3, 1.1, 0.7, 2.0, 1.4]
    rows = [
        {"method": "m", "quantity": "distance", "run": k, "round": t, "value": value + t}
        for k, value in enumerate(values)
        for t in (1, 2)
    ]
    axes = Figure().subplots()
    draw_means(axes, rows, "round", choose_look(0), "m")
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    interval = interval_of_mean(values)
    assert [heights.min(), heights.max()] == pytest.approx([interval.low + 1, interval.high + 2])


def test_one_study_writes_its_files(only_tiny, tmp_path, capsys):
    run("tiny", "--out", str(tmp_path / "a" / "b"), "--seed", "3")
    names = {path.name for path in (tmp_path / "a" / "b").iterdir()}
    assert names == {"tiny.csv", "tiny.png", "tiny.pdf", "tiny.txt"}
    assert (only_tiny[0].quick, only_tiny[0].seed, only_tiny[0].repeats) == (False, 3, 5)
    printed = capsys.readouterr().out
    assert "50%  half" in printed
    assert "2 rows" in printed
    assert "written to" in printed


def test_quick_and_the_number_of_seeds(only_tiny, tmp_path):
    run("tiny", "--out", str(tmp_path / "a"), "--quick")
    run("tiny", "--out", str(tmp_path / "b"), "--quick", "--seeds", "9")
    assert [call.repeats for call in only_tiny] == [2, 9]


def test_all_and_resuming_it(only_tiny, tmp_path, capsys):
    run("tiny", "--out", str(tmp_path / "all" / "tiny"))
    run("all", "--out", str(tmp_path / "all"), "--resume")
    assert len(only_tiny) == 2  # tiny was kept
    assert (tmp_path / "all" / "tinier" / "tinier.png").stat().st_size > 0
    assert "tiny: kept" in capsys.readouterr().out


def test_a_study_of_real_problems_continues_and_is_not_one_of_all(monkeypatch, tmp_path):
    calls = []

    def measure(settings):
        calls.append(settings)
        new = [name for name in settings.problems if not where(settings.kept, method=name)]
        return [*settings.kept, *({"method": n, "quantity": "q", "value": 1.0} for n in new)]

    real = tiny()._replace(measure=measure, problems=("one", "other"), repeats=(0, 2))
    monkeypatch.setattr(command, "studies", lambda: {"real": real, "tiny": tiny()})
    run("all", "--out", str(tmp_path / "all"))
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["tiny"]
    out = ["--out", str(tmp_path / "real")]
    run("real", *out, "--problems", "one")
    run("real", *out, "--problems", "other,one", "--resume")
    assert [call.problems for call in calls] == [("one",), ("other", "one")]
    assert [len(call.kept) for call in calls] == [0, 1]
    assert {call.runs for call in calls} == {tmp_path / "real" / "runs"}
    rows = read_csv(tmp_path / "real" / "real.csv")
    assert [row["method"] for row in rows] == ["one", "other"]


def test_redrawing_measures_nothing(only_tiny, tmp_path):
    run("tiny", "--out", str(tmp_path / "a"))
    run("tiny", "--out", str(tmp_path / "b"), "--redraw", str(tmp_path / "a" / "tiny.csv"))
    assert len(only_tiny) == 1
    for name in ("tiny.csv", "tiny.png", "tiny.pdf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_an_interrupted_study_leaves_nothing(monkeypatch, tmp_path):
    def measure(settings):
        raise KeyboardInterrupt

    found = {"tiny": tiny()._replace(measure=measure)}
    monkeypatch.setattr(command, "studies", lambda: found)
    with pytest.raises(SystemExit) as leaving:
        main(["study", "tiny", "--out", str(tmp_path / "a")])
    assert leaving.value.code == 130
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tyo", "--out", "x"], "study = 'tyo': unknown study; choose from bias-variance,"),
        (["--out", "x"], "fedpa study needs NAME and --out"),
        (["toy"], "fedpa study needs NAME and --out"),
        (["toy", "--out", "x", "--seeds", "0"], "seeds = 0: must be a whole number, at least 1"),
        (["timing", "--out", "x", "--repeats", "0"], "repeats = 0: must be a whole number"),
        (["toy", "--out", "x", "--repeats", "3"], "repeats = 3: does not apply to toy"),
        (["ess", "--out", "x", "--seeds", "3"], "seeds = 3: does not apply to ess"),
        (["toy", "--out", "x", "--seed", "-1"], "seed = -1: must be a whole number, at least 0"),
        (["toy", "--out", "x", "--resume"], "resume = True: does not apply to toy"),
        (["toy", "--out", "x", "--problems", "mlp"], "problems = 'mlp': does not apply to toy"),
        (["switch", "--out", "x", "--problems", "mpl"], "problem = 'mpl'"),
        (["switch", "--out", "x", "--problems", ","], "problems = ','"),
        (["switch", "--out", "x", "--problems", "mlp", "--quick"], "problems = 'mlp'"),
        (["toy", "--out", "x", "--redraw", "no.csv"], "redraw = 'no.csv'"),
        (["toy", "--out", "x", "--fast"], "unknown option --fast"),
    ],
)
def test_refusals(capsys, monkeypatch, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_empty_or_no_directory(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in refused(capsys, "toy", "--out", str(tmp_path))
    assert "is a file" in refused(capsys, "toy", "--out", str(tmp_path / "notes.txt"))
    assert "is a file" in refused(capsys, "all", "--out", str(tmp_path / "notes.txt" / "x"))


def test_a_directory_that_can_not_be_written(capsys, monkeypatch, tmp_path):
    """Whoever runs the test, root included: the first file written to it is denied."""

    def denied(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(command.tempfile, "TemporaryFile", denied)
    message = refused(capsys, "toy", "--out", str(tmp_path / "a" / "b"))
    assert "can't be written: Permission denied" in message
    assert not list(tmp_path.iterdir())


def test_a_directory_that_can_not_be_made(capsys):
    assert "can't be written" in refused(capsys, "toy", "--out", "/proc/fedpa-study")


def test_every_option_has_a_help():
    documented = dataclasses.fields(command.StudyCommand)
    assert {field.name for field in documented} >= {"name", "out", "quick", "seed"}


def test_what_resume_keeps_must_be_what_was_asked_for(only_tiny, capsys, tmp_path):
    run("tiny", "--out", str(tmp_path / "all" / "tiny"), "--quick")
    message = refused(capsys, "all", "--out", str(tmp_path / "all"), "--resume")
    assert "seed 0 and full size" in message
    (tmp_path / "all" / "tiny" / "tiny.csv").write_text("x")
    assert "remove it" in refused(capsys, "all", "--out", str(tmp_path / "all"), "--resume")


def test_redrawing_a_cut_file(capsys, tmp_path):
    """Whole lines, but not all of them."""
    rows = [{"method": "client 1", "quantity": "x", "value": 1.0}]
    (tmp_path / "cut.csv").write_text(as_csv(studies()["toy"], rows, seed=0, quick=False))
    words = ["toy", "--redraw", str(tmp_path / "cut.csv"), "--out", str(tmp_path / "out")]
    assert "rows of the study" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_redrawing_refuses_other_files_and_other_options(capsys, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("colour,quantity,value\nred,q,1\n")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    out = str(tmp_path / "out")
    for path in (other, binary):
        assert "CSV of" in refused(capsys, "toy", "--out", out, "--redraw", str(path))
    words = ["toy", "--out", out, "--redraw", str(other), "--quick"]
    assert "quick = True: nothing is measured" in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["bias-variance", "correction", "switch", "timing", "toy"])
def test_figures_of_stored_rows_give_each_method_its_colour(name):
    figure = studies()[name].draw(read_csv(ROOT / f"docs/studies/{name}/{name}.csv"))
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    methods = {"FedAvg": "fedavg", "FedPA": "fedpa", "mean": "mean", "mean-scaled": "mean-scaled"}
    methods["FedAvg[1]"] = "fedavg-1"
    seen = set()
    for line in lines:
        word = re.match(r"[A-Za-z]*(-scaled|\[1\])?", line.get_label())[0]
        if word in methods and "OAS" not in line.get_label():  # `fedpa-oas` is a method of its own
            seen.add(word)
            look = choose_look(PLACES[methods[word]])
            assert line.get_color() == COLOURS[look.colour], line.get_label()
    assert "FedPA" in seen
