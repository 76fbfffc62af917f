"""The program as a user meets it: exit codes, one-line errors.

As a real process where that is the point; else by the `main` that the command runs, in this
process: starting Python and JAX takes longer than most of what is tested.
"""

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

import fedpa
from fedpa.experiments.cli.arguments import list_options
from fedpa.experiments.cli.commands.compare import CompareCommand
from fedpa.experiments.cli.commands.run import RunCommand
from fedpa.experiments.cli.commands.sweep import SweepCommand
from fedpa.experiments.cli.main import main
from fedpa.experiments.cli.training_commands import GROUPS, parse_run_command
from fedpa.experiments.config import resolve
from fedpa.experiments.methods import METHODS

QUICK = ["--rounds", "3", "--clients-per-round", "3", "--epochs", "2", "--burn-in-rounds", "1"]


def cli(*words, cwd, expect=0, compile_anew=False):
    """Run `python -m fedpa` as a user would, without a terminal."""
    environment = os.environ | {"COLUMNS": "100"}
    if compile_anew:
        del environment["JAX_COMPILATION_CACHE_DIR"]
    done = subprocess.run(
        [sys.executable, "-m", "fedpa", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def refused(*words, cwd):
    """The one line on standard error; nothing is left behind."""
    before = sorted(cwd.rglob("*"))
    done = cli(*words, cwd=cwd, expect=2)
    assert sorted(cwd.rglob("*")) == before, "something was written"
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def refused_here(*words, capsys):
    """The same of `main`."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    assert sorted(Path().rglob("*")) == before, "something was written"
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture(name="here")
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def test_version_and_help(here, capsys):
    assert cli("--version", cwd=here).stdout.strip() == f"fedpa {fedpa.__version__}"
    main(["--help"])
    assert "compare" in capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["run", "--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    words = "method rounds clients-per-round epochs batch-size burn-in-rounds samples rho seed"
    for option in (words.replace(" samples", "") + " out config overwrite dry-run").split():
        assert f"--{option}" in text
    assert "(default: 350)" in text  # the task's own default


def show_help(*words, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        main(words)
    return capsys.readouterr().out.splitlines()


COMMON = {"run": RunCommand, "compare": CompareCommand, "sweep": SweepCommand}


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", COMMON)
def test_help_is_short_and_help_all_complete(name, columns, capsys, monkeypatch):
    how = {"columns": columns, "capsys": capsys, "monkeypatch": monkeypatch}
    short = show_help(name, "--help", **how)
    assert len(short) <= 60
    everything = show_help(name, "--help-all", **how)
    assert max(map(len, short + everything)) <= columns
    text = "\n".join(everything)
    for odd in ("None", "{", "INT", "options options"):
        assert odd not in text
    options = [o for o in list_options(COMMON[name]).values() if not o.positional]
    for option in options:
        assert len(re.findall(rf"^  {option.name}\b(?!-)", text, re.MULTILINE)) == 1, option.name
    shown = [line for line in short if line.startswith("  --")]
    assert 12 <= len(shown) <= 20
    assert f"fedpa {name} --help-all shows all {len(options)} options." in short
    assert sum(line.startswith(f"  fedpa {name} ") for line in short) >= 3  # examples


def test_every_option_of_a_run_has_one_group():
    grouped = [field for fields in GROUPS.values() for field in fields]
    assert len(set(grouped)) == len(grouped)
    options = list_options(RunCommand)
    own = {"task", "out", "config", "overwrite", "dry_run", "max_minutes", "quiet"}
    assert set(options) == {*grouped, *own}


def test_a_preset_replaces_the_default_that_help_states(capsys, monkeypatch):
    how = {"columns": 100, "capsys": capsys, "monkeypatch": monkeypatch}
    for task, share in (("digits", "0"), ("emnist", "0.1")):
        text = " ".join(" ".join(show_help("run", task, "--help-all", **how)).split())
        assert f"held out for validation, in [0, 1) (default: {share}) --" in text


@pytest.mark.parametrize(
    ("words", "field", "meant"),
    [
        (["runn"], "runn", "run"),
        (["run", "--metod", "fedavg"], "--metod", "--method"),
        (["run", "digts"], "task", "digits"),
        (["run", "--method", "fedap"], "method", "fedpa"),
        (["run", "--client-optimizer", "adm"], "client_optimizer", "adam"),
        (["run", "--sample-scale", "sqrtn2"], "sample_scale", "sqrt-n"),
        (["run", "--client-schedule", "exponentail:0.1"], "client_schedule", "exponential"),
        (["run", "--iterate-averaging", "polyac"], "iterate_averaging", "polyak"),
        (["run", "--aggregation", "mediam"], "aggregation", "median"),
        (["run", "--engine", "lokal"], "engine", "local"),
        (["sweep", "--search", "grd"], "search", "grid"),
        (["compare", "--methods", "fedavg,fedpa", "--reference", "fedvag"], "reference", "fedavg"),
        (["eval", "a", "--split", "tset"], "split", "test"),
        (["data", "get", "fed_emnits"], "data set", "fed_emnist"),
    ],
)
def test_a_mistyped_word_is_answered_by_the_one_that_is_close(here, capsys, words, field, meant):
    said = refused_here(*words, capsys=capsys)
    assert field in said
    assert f"did you mean {meant}?" in said


def test_help_is_a_command_too(here, capsys):
    def said(*words):
        with contextlib.suppress(SystemExit):
            main(words)
        return capsys.readouterr().out

    assert said("help") == said("--help")
    assert said("help", "run") == said("run", "--help")
    assert said("help", "data") == said("data", "--help")
    assert said("help", "data", "info") == said("data", "info", "--help")
    assert not re.search(r"--method\b", said("compare", "--help"))
    assert "unknown command 'runn'" in refused_here("help", "runn", capsys=capsys)


def test_terminals_without_greek_letters_are_written_to(here):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "fedpa", "methods"]
    done = subprocess.run(words, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"sends ? / ?" in done.stdout


def test_names_are_known_whatever_their_case_and_hyphens(here):
    words = "--method MimeLite --preset Laptop --engine DEBUG --weighting Uniform --rounds 2"
    config = parse_run_command(RunCommand, ["Digits", *words.split()], "fedpa run")[0].run
    assert (config.task, config.method, config.preset) == ("digits", "mime-lite", "laptop")
    assert (config.engine, config.hyperparameters.weighting) == ("debug", "uniform")
    Path("mine.toml").write_text('task = "DIGITS"\nmethod = "fed_pa"\n')
    words = ["--config", "mine.toml", "--sampler", "SGLD"]
    config = resolve(parse_run_command(RunCommand, words, "fedpa run")[0].run)
    assert (config.task, config.method) == ("digits", "fedpa")
    assert config.hyperparameters.sampler == "sgld"
    with pytest.raises(SystemExit, match="0"):
        main(["Run", "--help"])


@pytest.mark.filterwarnings("default:all 3 rounds")
def test_a_comparison_without_sampling_is_warned_of_at_once(here, capsys, monkeypatch):
    monkeypatch.setattr("fedpa.experiments.cli.commands.compare.carry_out", lambda *_: sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main(
            ["compare", "--methods", "fedavg,fedpa,mean", "--rounds", "3", "--burn-in-rounds", "3"]
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: all 3 rounds of fedpa, mean are burn-in")


@pytest.mark.parametrize("columns", [40, 80, 130])
def test_methods_are_listed_for_narrow_and_wide_terminals(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["methods"])
    text = capsys.readouterr().out
    assert max(map(cell_len, text.splitlines())) <= columns
    assert "…" not in text
    said = " ".join(text.split())  # wrapped between words only
    for name, method in METHODS.items():
        facts = [method.sends, method.keeps, method.cost]
        sends, keeps, cost = ("nothing" if fact == "–" else fact for fact in facts)
        assert f"{name} {method.summary} sends {sends}; keeps {keeps}; cost {cost}" in said
    main(["methods", "--json"])
    assert json.loads(capsys.readouterr().out)["fedprox"]["options"] == ["proximal"]


@pytest.mark.long
def test_run_twice_is_bit_for_bit_the_same_and_seeds_differ(here, capsys):
    """One seed, one result, in two processes; two seeds, two results."""
    first = cli("run", *QUICK, "--out", "a", cwd=here, compile_anew=True)
    assert "written to a" in first.stdout
    assert "round 3/3" in first.stdout
    again = ["--config", "a/config.toml", "--out", "b"]
    cli("run", "digits", *again, cwd=here)  # by programs that were compiled before
    main(["run", "--config", "a/config.toml", "--seed", "1", "--out", "c"])
    capsys.readouterr()

    def metrics(name):
        lines = (here / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) | {"seconds": None} for line in lines]

    parameters = {name: (here / name / "params.npz").read_bytes() for name in "abc"}
    assert metrics("a") == metrics("b") != metrics("c")
    assert parameters["a"] == parameters["b"] != parameters["c"]
    assert fedpa.load(here / "c").config.seed == 1
    error = refused_here("run", *QUICK, "--out", "a", capsys=capsys)
    assert "already contains a run" in error
    assert "--overwrite" in error


def test_without_out_a_fresh_directory_is_named(here, capsys):
    main(["run", *QUICK[:-2], "--method", "fedavg", "--seed", "7"])
    (made,) = (here / "runs").iterdir()
    assert made.name.endswith("-digits-fedavg")
    assert f"runs/{made.name}" in capsys.readouterr().out
    assert {record["phase"] for record in fedpa.load(made).metrics} == {"training"}


def test_compare_writes_runs_table_and_curves(here, capsys, monkeypatch):
    words = ["compare", "digits", *QUICK, "--methods", "fedpa,mean-scaled"]
    main([*words, "--seeds", "2", "--out", "cmp"])
    said = capsys.readouterr().out
    out = here / "cmp"
    names = {f"{m}-{s}" for m in ("fedpa", "mean-scaled") for s in (0, 1)}
    files = {"table.csv", "table.tex", "curves.png", "report.html", "burn-in", "comparison.toml"}
    assert {path.name for path in out.iterdir()} == names | files
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["FedPA[2]", "mean-scaled[2]"]
    assert rows[0]["seeds"] == "2"
    assert "FedPA[2]" in said
    assert (out / "report.html").as_uri() in said
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    # The first round of FedPA and its control was made once; each is the run it would have been.
    main(["run", *QUICK, "--seed", "1", "--quiet", "--out", "alone"])
    assert (here / "alone" / "params.npz").read_bytes() == (
        out / "fedpa-1" / "params.npz"
    ).read_bytes()
    phases = {n: [r["phase"] for r in fedpa.load(n).metrics] for n in ("alone", "cmp/fedpa-1")}
    assert phases["alone"] == phases["cmp/fedpa-1"] == ["burn-in", "sampling", "sampling"]
    (shared, _) = sorted((out / "burn-in").iterdir())
    assert [record["phase"] for record in fedpa.load(shared).metrics] == ["training"]
    # Again: what is finished stays, what is missing is run, what was cut is resumed.
    kept = (out / "fedpa-1" / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(out / "fedpa-0")
    (out / "mean-scaled-1" / "summary.json").unlink()
    before = (out / "table.csv").read_text()
    with monkeypatch.context() as patched:  # interrupted where it is about to take over the rounds
        patched.setattr(import_module("fedpa.training.run"), "_branch", _interrupted)
        with pytest.raises(SystemExit, match="130"):
            main([*words, "--seeds", "2", "--out", "cmp", "--jobs", "1"])
    assert "interrupted, 2 of 4 runs are finished: `fedpa" in capsys.readouterr().err
    main([*words, "--seeds", "2", "--out", "cmp", "--jobs", "1"])
    assert (out / "fedpa-1" / "metrics.jsonl").stat().st_mtime_ns == kept
    after = (out / "table.csv").read_text()
    assert _without_seconds(after) == _without_seconds(before)
    capsys.readouterr()
    there = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    for more in (["--rho", "0.5"], ["--burn-in-rounds", "2"], ["--rounds", "2"]):
        said = refused_here(*words, "--seeds", "3", *more, "--out", "cmp", capsys=capsys)
        assert "can't be resumed" in said or "rounds = 2" in said
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == there
    assert "cmp/fedpa-0'" in refused_here(*words, "--out", "cmp/fedpa-0", capsys=capsys)


def _interrupted(*words):
    raise KeyboardInterrupt


def test_compare_leaves_the_files_of_others(here, capsys):
    for name in ("table.csv", "table.tex", "report.html", "trials"):
        place = Path(name.replace(".", "-"))
        place.mkdir()
        (place / name).touch()
        said = refused_here("compare", "digits", *QUICK, "--out", str(place), capsys=capsys)
        assert f"out = {str(place)!r}: contains {name}" in said


def test_compare_ends_by_a_signal_and_says_how_to_go_on(here, capsys, monkeypatch):
    def signalled(*words, **options):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # the first would wait for the end of a round

    monkeypatch.setattr("fedpa.experiments.comparison.tasks.run", signalled)
    with pytest.raises(SystemExit, match="143"):
        main(["compare", "digits", *QUICK, "--out", "cmp"])
    said = capsys.readouterr().err
    assert "interrupted, 0 of 12 runs are finished: `fedpa compare --out cmp` continues it" in said


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_comparisons_processes_end_with_it(here, number):
    words = [sys.executable, "-m", "fedpa", "compare", "digits", "--methods", "fedavg,fedavg-1"]
    words += ["--rounds", "100000", "--eval-every", "1000", "--jobs", "2", "--out", "cmp"]
    for _ in range(2):  # the second goes on where the first was ended
        process = subprocess.Popen(words)
        wait_until(lambda: len(list(here.glob("cmp/*/metrics.jsonl"))) == 2 and _grows(here))
        process.send_signal(number)
        assert process.wait(30) in (-number, 128 + number)
        wait_until(lambda: not _grows(here))


def _grows(here):
    sizes = [path.stat().st_size for path in here.glob("cmp/*/metrics.jsonl")]
    time.sleep(2)
    return sizes != [path.stat().st_size for path in here.glob("cmp/*/metrics.jsonl")]


def wait_until(true, seconds=90):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def _without_seconds(table):
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in csv.DictReader(table.splitlines())
    ]


@pytest.mark.filterwarnings("default:clients_per_round = 500")
def test_dry_run_prints_and_writes_nothing(here, capsys):
    main(["run", *QUICK, "--clients-per-round", "500", "--dry-run"])
    said, warned = capsys.readouterr()
    assert "clients_per_round = 500: there are only 100 clients" in warned
    assert "rounds = 3" in said
    assert "samples = 2" in said  # resolved
    assert "s per round" in said
    assert re.search(r"[\d.]+ [kM]?B per client", said)
    assert "iB" not in said  # one unit
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train"], "unknown command 'train'"),
        (["runn"], "did you mean run?"),
        (["run", "--rho", "-1"], "rho = -1.0: must be a finite number ≥ 0"),
        (["run", "--rho", "nan"], "rho = nan"),
        (["run", "--rho", "much"], "rho = 'much': must be a number"),
        (["run", "--rounds", "abc"], "rounds = 'abc': must be a whole number"),
        (["run", "--rounds=1.5"], "rounds = '1.5': must be a whole number"),
        (["run", "--clients_per_round", "x"], "clients_per_round = 'x': must be a whole number"),
        (["run", "--max-minutes", "x"], "max_minutes = 'x': must be a number"),
        (["run", "--sample-scale", "x"], "sample_scale = 'x': must be one of"),
        (["run", "--precision-rank", "x"], "precision_rank = 'x': must be a whole number or"),
        (["run", "--weighting", "x"], "weighting = 'x': must be one of"),
        (["run", "--quiet=1"], "quiet = '1': takes no value"),
        (["run", "--no-test-at-end=1"], "test_at_end = '1': takes no value"),
        (["run", "--rounds"], "--rounds needs a value"),
        (["run", "--rounds", "--rho", "1"], "--rounds needs a value"),
        (["run", "--task", "digits"], "unknown option --task: give the task without it"),
        (["run", "--method", "fedpaa"], "did you mean fedpa?"),
        (["run", "--sampler", "sgl"], "did you mean sgld?"),
        (["export"], "fedpa export needs DIR and FILE"),
        (["export", "some"], "fedpa export needs DIR and FILE"),
        (["study", "toi", "--out", "x"], "study = 'toi': unknown study"),
        (["compare", "--seeds", "two"], "seeds = 'two': must be a whole number"),
        (["sweep", "--trials", "x"], "trials = 'x': must be a whole number"),
        (["sweep", "--search", "x"], "search = 'x': "),
        (["data", "partition", "a.npz", "--clients", "1.5"], "clients = '1.5': must be a whole"),
        (["eval", "a-run", "--split", "all"], "split = 'all': must be one of"),
        (["run", "--samples", "0"], "samples = 0: must be a whole number"),
        (["run", "--samples", "9"], "one sample per epoch gives at most 5"),
        (["run", "--rouns", "3"], "unknown option --rouns; did you mean --rounds?"),
        (
            ["run", "--method", "fednova"],
            "method = 'fednova': unknown method; choose from ",
        ),
        (["run", "--proximal", "1"], "proximal = 1.0: does not apply to method fedpa; only to"),
        (["run", "--method", "fedprox", "--proximal", "-1"], "proximal = -1.0: must be a finite"),
        (["compare", "--proximal", "1"], "proximal = 1.0: does not apply to method fedavg; "),
        (["sweep", "--proximal", "1"], "proximal = 1.0: does not apply to method fedpa"),
        (["run", "mnist"], "task = 'mnist': unknown task; did you mean emnist?"),
        (["run", "--rounds", "0"], "rounds = 0"),
        (["run", "--shrinkage", "lw"], "'fixed', 'oas', 'rblw'"),
        (["run", "--config", "missing.toml"], "can't be read"),
        (["run", "digits", "again"], "again"),
        (["compare", "--methods", "fedpa,foo"], "method = 'foo': unknown method"),
        (["compare", "--methods", "fedpa,fedpa"], "methods = 'fedpa,fedpa'"),
        (["compare", "--methods", ","], "name at least one"),
        (["compare", "--seeds", "0"], "seeds = 0"),
        (["compare", "--jobs", "0"], "jobs = 0"),
        (["compare", "--reference", "mb-sgd"], "reference = 'mb-sgd'"),
        (["compare", "--published"], "the paper has no results for task digits"),
        (["compare", "--seed", "4294967295", "--seeds", "2"], "seed = 4294967296"),
        (["compare", "--method", "fedpa"], "did you mean --methods?"),
        (["compare", "--shrinkage", "oas"], "mean-scaled takes the step of a fixed ρ"),
        (["run", "--engine", "gpu"], "unknown engine; choose from debug, local"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_in_one_line(here, words, expected, capsys):
    assert expected in refused_here(*words, capsys=capsys)
    assert not list(here.iterdir())


def test_a_refusal_as_a_process(tmp_path):
    assert "rho = -1.0" in refused("run", "--rho", "-1", cwd=tmp_path)


@pytest.mark.long
def test_the_wheel_runs_outside_the_checkout(tmp_path):
    root = Path(__file__).parents[3]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(root)],
        check=True,
    )
    (wheel,) = tmp_path.glob("fedpa-*.whl")
    site, work = tmp_path / "site", tmp_path / "work"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    work.mkdir()
    environment = os.environ | {"PYTHONPATH": str(site)}
    code = "import fedpa; print(fedpa.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=work, env=environment, check=True, capture_output=True
    )
    assert str(site) in where.stdout.decode()
    done = subprocess.run(
        [str(site / "bin" / "fedpa"), "run", *QUICK, "--out", "run"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (work / "run" / "params.npz").exists()


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["hmc", "nuts", "sghmc", "sgld"])
def test_a_run_with_each_sampler(tmp_path, sampler, capsys):
    words = ["run", "digits", "--sampler", sampler, "--rounds", "2", "--clients-per-round", "2"]
    words += ["--burn-in-rounds", "1", "--epochs", "2", "--temperature", "1"]
    words += ["--sample-scale", "sqrt-n", "--out", str(tmp_path / "a")]
    main([*words, *(["--max-doublings", "3"] if sampler == "nuts" else [])])
    assert f"FedPA-{sampler.upper()}[2]" in capsys.readouterr().out
    run = fedpa.load(tmp_path / "a")
    assert run.config.hyperparameters.sampler == sampler
    assert run.config.hyperparameters.temperature == 1.0
    assert [record["train/rejected"] for record in run.metrics] == [0, 0]
    assert run.metrics[1]["train/correction_norm"] > 0


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["hmc", "nuts", "sghmc", "sgld"])
def test_each_sampler_learns_the_digits_at_its_defaults(tmp_path, sampler):
    words = ["--sampler", sampler, "--rounds", "60", "--burn-in-rounds", "20"]
    main(["run", "digits", *words, "--out", str(tmp_path / "a")])
    accuracy = [record["eval/accuracy"] for record in fedpa.load(tmp_path / "a").metrics]
    assert np.mean(accuracy[15:20]) < 0.75  # the burn-in's
    assert np.mean(accuracy[-10:]) > 0.82


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampler", "hcm"], "sampler = 'hcm': unknown sampler"),
        (["--temperature", "1"], "temperature = 1.0: does not apply to sampler iasg"),
        (["--sampler", "sgld", "--friction", "0.1"], "friction = 0.1: does not apply to sampler"),
        (["--sampler", "nuts", "--integration-steps", "5"], "integration_steps = 5: does not"),
        (["--sampler", "hmc", "--max-doublings", "5"], "max_doublings = 5: does not apply"),
        (["--sampler", "sgld", "--target-acceptance", "0.8"], "target_acceptance = 0.8: does not"),
        (["--sampler", "hmc", "--target-acceptance", "0.8"], "target_acceptance = 0.8: needs a b"),
        (["--sampler", "sgld", "--temperature", "0"], "temperature = 0.0: must be a finite number"),
        (["--sampler", "sghmc", "--friction", "2"], "friction = 2.0: must be above 0 and at most"),
        (["--sampler", "sgld", "--client-momentum", "0.9"], "client_momentum = 0.9: applies to"),
        (["--sampler", "sgld", "--client-optimizer", "adam"], "client_optimizer = 'adam': applies"),
        (["--sampler", "nuts", "--order", "replacement"], "order = 'replacement': does not apply"),
        (["--sampler", "sgld", "--method", "fedavg"], "--sampler does not apply to fedavg"),
    ],
)
def test_sampler_options_that_do_not_apply_are_refused(
    tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        main(["run", "digits", *words])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_method_that_does_not_sample_takes_no_harm_from_a_samplers_settings(
    tmp_path, monkeypatch
):
    """The configuration of a comparison's FedAvg is one that `fedpa run` takes back."""
    monkeypatch.chdir(tmp_path)
    words = ["compare", "digits", "--methods", "fedavg-1,fedpa", "--rounds", "1", "--out", "both"]
    words += ["--clients-per-round", "1", "--sampler", "sgld", "--temperature", "1"]
    main([*words, "--burn-in-rounds", "0", "--epochs", "2"])
    assert "sgld" not in Path("both/fedavg-1-0/config.toml").read_text()
    assert 'sampler = "sgld"' in Path("both/fedpa-0/config.toml").read_text()
    # FedAvg[1] ran one epoch, the other two, on the same settings otherwise.
    assert fedpa.load("both/fedpa-0").config.hyperparameters.epochs == 2
    assert fedpa.load("both/fedavg-1-0").config.hyperparameters.epochs == 1
    main(["run", "--config", "both/fedavg-1-0/config.toml", "--out", "again"])
