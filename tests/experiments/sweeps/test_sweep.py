"""`fedpa sweep` as a user meets it: with stand-ins for training, and once for real."""

import csv
import dataclasses
import io
import signal
import subprocess
import sys
import time

import jax
import pytest
from rich.console import Console

import fedpa
from fedpa.errors import TooFewClientsError
from fedpa.experiments.cli.main import main
from fedpa.experiments.config import default_config, read_toml
from fedpa.experiments.sweeps import sweep as sweeping
from fedpa.experiments.sweeps.search import Trial, choose_search
from fedpa.experiments.sweeps.sensitivity import draw_sensitivity, find_marginals, sensitivity_table
from fedpa.experiments.sweeps.space import Interval, parse_space, point, size
from fedpa.experiments.sweeps.sweep import Sweep, Watch, check_sweep, sweep
from fedpa.experiments.tasks import TaskOptions
from fedpa.experiments.tasks.task import task_named
from fedpa.experiments.workers import default_jobs
from fedpa.training import run_directory
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.options import StorageOptions
from tests.experiments.sweeps.objective import outcome_of

QUICK = ["--rounds", "3", "--clients-per-round", "2", "--epochs", "1", "--checkpoint-every", "1"]


@pytest.fixture(name="pretended")
def _pretended(monkeypatch):
    """Trials that end at once; the list of those that were run."""
    ran = []

    def performed(job, problem, *callbacks):
        ran.append(job.out)
        h = job.config.hyperparameters
        return outcome_of({"rho": h.rho, "rate": h.client_learning_rate, "epochs": h.epochs - 2})

    monkeypatch.setattr(sweeping, "run_trial", performed)
    return ran


def said(capsys, *words, code=0):
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as leaving:
            main(["sweep", *map(str, words)])
        assert leaving.value.code == code
        return capsys.readouterr().err.strip()
    main(["sweep", *map(str, words)])
    return capsys.readouterr().out


def rows(out):
    return list(csv.DictReader(io.StringIO((out / "trials.csv").read_text())))


def write_space(tmp_path, text):
    path = tmp_path / "space.toml"
    path.write_text(f"[space]\n{text}\n")
    return path


@pytest.mark.long
def test_a_tasks_own_grid(pretended, tmp_path, capsys):
    out = tmp_path / "sweep"
    text = said(capsys, "digits", "--out", out)
    assert "there are no validation clients" in text
    assert "trial 0 (1 of 9)  burn_in_rounds 10, rho 0.01" in text
    assert "best: trial 0, burn_in_rounds 10, rho 0.01" in text
    assert len(pretended) == 9
    assert {path.name for path in out.iterdir()} >= {
        *("sweep.toml", "optuna.journal", "best.toml", "trials.csv", "sensitivity.png")
    }
    assert read_toml(out / "best.toml").hyperparameters.rho == 0.01
    # The same words, or none but the directory: nothing is left to run.
    assert "best: trial 0" in said(capsys, "digits", "--out", out)
    assert "best: trial 0" in said(capsys, "--out", out)
    assert said(capsys, "--out", out, "--quiet").strip() == str(out)
    assert len(pretended) == 9


def test_what_the_command_line_fixes_is_not_swept(pretended, tmp_path, capsys):
    out = tmp_path / "sweep"
    said(capsys, "digits", "--rho", "0.5", "--rounds", "15", "--out", out, "--quiet")
    assert [row["burn_in_rounds"] for row in rows(out)] == ["10"]
    assert read_toml(out / "best.toml").hyperparameters.rho == 0.5
    text = said(capsys, "digits", "--method", "fedavg-1", "--out", tmp_path / "one")
    assert "over client_learning_rate, server_learning_rate" in text
    assert "left out of the grid: epochs 2, 5, which fedavg-1 can't use" in text


def test_a_signal_says_how_to_go_on(pretended, tmp_path, capsys, monkeypatch):
    out = tmp_path / "a sweep"
    performed = sweeping.run_trial

    def interrupted(job, problem, *callbacks):
        if job.out.name == "2":  # this one has no rounds after which the first would end it
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        return performed(job, problem, *callbacks)

    monkeypatch.setattr(sweeping, "run_trial", interrupted)
    text = said(capsys, "digits", "--out", out, code=143)
    assert text == f"interrupted: `fedpa sweep --out '{out}'` continues it"
    assert [row["state"] for row in rows(out)] == ["finished"] * 2
    monkeypatch.setattr(sweeping, "run_trial", performed)
    text = said(capsys, "--out", out)
    assert "trial 2 (3 of 9)  burn_in_rounds 10, rho 1: was interrupted, resumed" in text
    assert len(pretended) == 9


def test_as_the_paper_did(pretended, tmp_path, capsys):
    out = tmp_path / "sweep"
    text = said(capsys, "digits", "--paper", "--out", out)
    assert "12 trials of fedavg" in text
    assert "9 trials of fedpa" in text
    first = read_toml(out / "1-fedavg" / "best.toml")
    config = read_toml(out / "best.toml")
    assert (first.method, config.method) == ("fedavg", "fedpa")
    for name in ("client_learning_rate", "server_learning_rate", "epochs"):
        assert getattr(first.hyperparameters, name) == getattr(config.hyperparameters, name)
    assert config.hyperparameters.epochs == 2  # not the preset's
    assert (out / "best.toml").read_bytes() == (out / "2-fedpa" / "best.toml").read_bytes()
    assert "was interrupted" not in said(capsys, "digits", "--paper", "--out", out)
    assert len(pretended) == 21
    (out / "best.toml").unlink()  # killed between the stages' end and this
    said(capsys, "--out", out)
    assert (out / "best.toml").exists()
    assert len(pretended) == 21
    refusal = said(capsys, "digits", "--paper", "--rounds", "99", "--out", out, code=2)
    assert "training.run.rounds was 350 and is 99" in refusal
    assert "trials = 3" in said(capsys, "--out", out, "--trials", "3", code=2)
    assert "in stages" in said(capsys, "digits", "--out", out, code=2)
    space = write_space(tmp_path, "rho = [1.0]")
    refusal = said(capsys, "digits", "--paper", "--space", space, code=2)
    assert "there is no rate" in refusal


def test_stages_of_few_points_try_them_all(pretended, tmp_path, capsys):
    words = ["digits", "--paper", "--search", "random", "--trials", "10"]
    text = said(capsys, *words, "--out", tmp_path / "sweep")
    assert "10 trials of fedavg" in text
    assert "fedpa has only 9 points" in text
    assert len(pretended) == 19


def test_going_on_takes_the_directorys_word(pretended, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "contains no sweep to resume" in said(capsys, "--out", "digits", code=2)
    space = write_space(tmp_path, "epochs = [5, 6]")
    said(capsys, "digits", "--samples", "5", "--space", space, "--out", "digits")
    said(capsys, "--out=digits", "--quiet", "--jobs", "1")
    assert len(pretended) == 2
    space = write_space(tmp_path, "rho = {low = 0.1, high = 1.0}")
    said(capsys, "digits", "--search", "tpe", "--trials", "2", "--space", space, "--out", "tpe")
    said(capsys, "--out", "tpe", "--trials", "4")
    assert len(pretended) == 2 + 4


REFUSED = [
    (["digits", "--method", "fedpaa"], "", "method = 'fedpaa': unknown method"),
    (["digitss"], "", "task = 'digitss'"),
    (["digits", "--search", "bayes"], "", "search = 'bayes': "),
    (["digits", "--jobs", "0"], "", "jobs = 0"),
    (["digits", "--trials", "3"], "", "trials = 3: the grid has 9 points"),
    (["digits", "--space", "missing.toml"], "", "can't be read"),
    (["digits"], "rhoo = [1.0]", "rhoo can't be swept: did you mean rho?"),
    (["digits"], "rho = []", "rho = []: is empty"),
    (["digits"], "rho = [true]", "rho = True: must be a number"),
    (["digits"], "rho = [-1.0]", "rho = -1.0: must be a finite number"),
    (["digits"], "rho = {low = 0.1, high = 1.0}", "rho is an interval"),
    (["digits", "--rho", "1"], "rho = [0.1]", "rho = 1.0: is also in the space"),
    (["digits", "--method", "fedavg"], "rho = [0.1, 1.0]", "method fedavg takes 0.1 always"),
    (["digits", "--method", "fedavg", "--rho", "1"], "epochs = [2]", "--rho does not apply"),
    (
        ["digits", "--rounds", "5"],
        "burn_in_rounds = [5]",
        "none of the 5 rounds of fedpa would sample",
    ),
    (["digits", "--rounds", "5", "--rho", "1"], "", "nothing is left to sweep"),
    (["digits", "--paper", "--method", "mean"], "", "method = 'mean': --paper"),
    (["digits", "--stop-metric", "eval/f1", "--patience", "2"], "", "stop_metric = 'eval/f1'"),
]


@pytest.mark.parametrize(("words", "space", "text"), REFUSED)
def test_refused_before_anything_is_made(words, space, text, tmp_path, capsys, pretended):
    out = tmp_path / "sweep"
    if space:
        words = [*words, "--space", write_space(tmp_path, space)]
    refusal = said(capsys, *words, "--out", out, code=2)
    assert text in refusal
    assert "\n" not in refusal
    assert not out.exists()
    assert not pretended


def test_other_settings_and_other_contents_are_refused(pretended, tmp_path, capsys):
    out = tmp_path / "sweep"
    said(capsys, "digits", "--out", out)
    refusal = said(capsys, "digits", "--out", out, "--seed", "1", code=2)
    assert "run.seed was 0 and is 1" in refusal
    assert "without stages" in said(capsys, "digits", "--out", out, "--paper", code=2)
    run = tmp_path / "run"
    run.mkdir()
    run_directory.write_config(run, {}, {"source": "x"})
    assert "already contains a run" in said(capsys, "digits", "--out", run, code=2)


def real_sweep():
    base = default_config("digits", "fedavg")
    # The server's: clients' programs are then the same in all trials, and compiled once.
    space = parse_space({"server_learning_rate": [0.3, 1.0], "server_momentum": [0.0, 0.5]}, "")
    recording = StorageOptions(checkpoint_every=1)
    config = dataclasses.replace(base, rounds=3, clients_per_round=2, recording=recording)
    return check_sweep(Sweep(config, space, choose_search("grid", space, None, 0)))


@pytest.mark.long
def test_a_real_sweep_cut_in_the_middle_of_a_trial(tmp_path):
    settings, problem = (
        real_sweep(),
        task_named("digits").load(TaskOptions()),
    )
    whole = sweep(settings, tmp_path / "whole", problem)
    assert len({trial.value for trial in whole}) > 1
    rounds = []

    def begin(trial, again):
        def watch(event):
            rounds.append((trial.number, event.round))
            if (trial.number, event.round) == (1, 2) and not again:
                raise KeyboardInterrupt

        return [watch]

    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        sweep(settings, out, problem, watch=Watch(begin))
    sweep(settings, out, problem, watch=Watch(begin))
    # The first trial was not run again, the second went on after its last checkpoint.
    assert rounds.count((0, 1)) == 1
    assert rounds.count((1, 1)) == 1
    found = [{k: v for k, v in row.items() if k != "seconds"} for row in rows(out)]
    expected = [
        {k: v for k, v in row.items() if k != "seconds"} for row in rows(tmp_path / "whole")
    ]
    assert found == expected
    for number in range(4):  # each is an ordinary run
        run = fedpa.load(out / "trials" / str(number))
        best = run_directory.read_summary(out / "trials" / str(number))["best"]["round"]
        assert list_checkpoints(out / "trials" / str(number)) == sorted({best, 3})
        assert run.round == 3
        value = sum(r["eval/accuracy"] for r in run.metrics) / 3
        assert value == pytest.approx(whole[number].value)


def test_settings_under_which_clients_fail_have_no_value(tmp_path, monkeypatch):
    def failing(*words, **options):
        raise TooFewClientsError("round 2: 1 of 2 clients succeeded")

    settings, problem = (
        real_sweep(),
        task_named("digits").load(TaskOptions()),
    )
    monkeypatch.setattr(sweeping, "run", failing)
    found = sweep(settings, tmp_path, problem)
    assert [trial.state for trial in found] == ["failed"] * 4
    assert {row["stopped"] for row in rows(tmp_path)} == {"round 2: 1 of 2 clients succeeded"}
    assert not (tmp_path / "best.toml").exists()


def test_a_directory_of_other_parameters_is_not_taken_for_a_trial(tmp_path):
    settings, problem = (
        real_sweep(),
        task_named("digits").load(TaskOptions()),
    )
    trial = tmp_path / "trials" / "0"
    trial.mkdir(parents=True)
    run_directory.write_config(trial, {"hyperparameters": {"rho": 7.0}}, {"source": "x"})
    with pytest.raises(fedpa.FedpaError, match=r"hyperparameters\.rho was 7\.0 and is 0\.1"):
        sweep(settings, tmp_path, problem, force=True)


@pytest.mark.long
def test_sigkill_of_a_sweep_with_workers(tmp_path):
    space = write_space(tmp_path, "rho = {low = 0.01, high = 1.0}")
    words = ["digits", *QUICK, "--burn-in-rounds", "1", "--search", "random", "--trials", "4"]
    words += ["--space", str(space), "--quiet"]

    def command(out, *more):
        return [sys.executable, "-m", "fedpa", "sweep", *words, "--out", str(out), *more]

    subprocess.run(command(tmp_path / "whole"), check=True)
    out = tmp_path / "killed"
    for _ in range(3):
        process = subprocess.Popen(command(out, "--jobs", "2"), stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        before = len(list(out.glob("trials/*/metrics.jsonl")))
        while len(list(out.glob("trials/*/metrics.jsonl"))) == before and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.kill()
        process.wait()
    subprocess.run(command(out, "--jobs", "2"), check=True)
    for one, other in zip(rows(out), rows(tmp_path / "whole"), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.long
def test_sigkills_anywhere_in_two_stages(tmp_path):
    """A dozen, at moments spread over the whole of it, imports and the ends of stages included."""
    space = write_space(tmp_path, "server_learning_rate = [0.5, 1.0]\nrho = [0.1, 1.0]")
    words = ["digits", *QUICK, "--burn-in-rounds", "1", "--paper", "--jobs", "1"]

    def command(out):
        places = ["--space", str(space), "--out", str(out), "--quiet"]
        return [sys.executable, "-m", "fedpa", "sweep", *words, *places]

    began = time.monotonic()
    subprocess.run(command(tmp_path / "whole"), check=True)
    whole, out = time.monotonic() - began, tmp_path / "killed"
    for kill in range(12):
        process = subprocess.Popen(command(out), stderr=subprocess.DEVNULL)
        time.sleep(whole * (0.3 + 0.06 * kill))
        process.kill()
        process.wait()
    subprocess.run(command(out), check=True)
    for stage in ("1-fedavg", "2-fedpa"):
        for one, other in zip(rows(out / stage), rows(tmp_path / "whole" / stage), strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert (out / "best.toml").read_text() == (tmp_path / "whole" / "best.toml").read_text()


def test_marginals_and_their_picture():
    space = {
        "rho": (0.01, 0.1, 1.0),
        "client_learning_rate": Interval(0.001, 0.1, True),
        "server_optimizer": ("sgd", "adam"),
        "epochs": (2, 5),
    }
    trials = [
        Trial(0, _params(0.01, 0.002, "sgd", 2), "finished", 0.5, {}),
        Trial(1, _params(0.01, 0.05, "adam", 2), "finished", 0.7, {}),
        Trial(2, _params(1.0, 0.1, "sgd", 5), "finished", 0.6, {}),
        Trial(3, _params(0.1, 0.01, "sgd", 5), "pruned", None, {}),
    ]
    rho, rate, optimizer, epochs = find_marginals(space, trials)
    assert [level.values for level in rho.levels] == [[0.5, 0.7], [], [0.6]]
    assert (rho.log, rate.log, optimizer.log, epochs.log) == (True, True, False, False)
    assert sum(len(level.values) for level in rate.levels) == 3
    assert rate.levels[-1].values == [0.7, 0.6]
    assert [level.label for level in optimizer.levels] == ["sgd", "adam"]
    console = Console(width=100, file=io.StringIO())
    console.print(sensitivity_table(space, trials, "valid/accuracy"))
    text = console.file.getvalue()
    assert "0.6000" in text
    assert "0.7000 *" in text
    for some in (dict(list(space.items())[:n]) for n in range(1, 5)):
        figure = draw_sensitivity(some, trials, "valid/accuracy", "fedpa", "title")
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert [axes.get_xlabel() for axes in shown] == [n.replace("_", " ") for n in some]
    draw_sensitivity(space, [], "valid/accuracy", "fedpa", "nothing yet")


def _params(rho, rate, optimizer, epochs):
    return {
        "rho": rho,
        "client_learning_rate": rate,
        "server_optimizer": optimizer,
        "epochs": epochs,
    }


def test_small_models_share_the_cores(monkeypatch):
    problem = task_named("digits").load(TaskOptions())
    monkeypatch.setattr("fedpa.experiments.workers.count_cores", lambda: 8)
    assert default_jobs(problem) == 4
    monkeypatch.setattr("fedpa.experiments.workers.count_cores", lambda: 2)
    assert default_jobs(problem) == 1
    big = problem._replace(init=lambda key: {"w": jax.numpy.zeros(200_000)})
    monkeypatch.setattr("fedpa.experiments.workers.count_cores", lambda: 8)
    assert default_jobs(big) == 1


def test_points_are_in_a_fixed_order():
    space = {"epochs": (1, 2), "rho": (0.1, 1.0)}
    assert [tuple(point(space, n).values()) for n in range(size(space))] == [
        *((1, 0.1), (1, 1.0), (2, 0.1), (2, 1.0))
    ]
