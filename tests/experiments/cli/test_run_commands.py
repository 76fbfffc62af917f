"""`run`, `resume`, `eval`, `export` as a user meets them; in this process where that is enough."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import fedpa
from fedpa.experiments.cli.commands import model
from fedpa.experiments.cli.main import main
from fedpa.training import provenance
from fedpa.training.checkpoint import list_checkpoints
from tests.training.test_kills import left

QUICK = ["--rounds", "4", "--clients-per-round", "3", "--epochs", "2", "--burn-in-rounds", "1"]
QUICK += ["--checkpoint-every", "2"]


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    main(["run", *QUICK, "--quiet", "--out", str(out)])
    return out


@pytest.fixture(name="unfinished")
def _unfinished(finished, tmp_path):
    """As a kill in round 4 would have left it."""
    out = shutil.copytree(finished, tmp_path / "run")
    for name in ("summary.json", "params.npz"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints" / "4")
    return out


def said(capsys, *words, code=0):
    """What a command prints, and its complaint if it fails."""
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as leaving:
            main([str(word) for word in words])
        assert leaving.value.code == code
        return capsys.readouterr().err.strip()
    main([str(word) for word in words])
    return capsys.readouterr().out


def test_quiet_prints_the_directory_alone(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(finished.parent)
    assert said(capsys, "resume", "run", "--quiet") == "run\n"


def test_an_unfinished_run_is_resumed_to_the_same_end(finished, unfinished, capsys):
    text = said(capsys, "resume", unfinished)
    assert re.search(r"round 4/4 +sampling +accuracy", text)
    assert "round 2/4" not in text
    assert "test accuracy" in text
    for a, b in zip(left(finished)[:2], left(unfinished)[:2], strict=True):
        assert a == b
    again = said(capsys, "resume", unfinished)
    assert "already finished, nothing was changed" in again
    assert said(capsys, "resume", unfinished, "--rounds", "5").count("round 5/5") == 1
    assert len((unfinished / "metrics.jsonl").read_text().splitlines()) == 5
    assert "rounds = 5" in (unfinished / "config.toml").read_text()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (("seed = 0", "seed = 3"), "seed was 0 and is 3"),
        (("rho = 1.0", "rho = 2.0"), r"hyperparameters\.rho was 1\.0 and is 2\.0"),
        (('data = "', 'data = "0'), "the data has changed"),
        (('optax = "', 'optax = "9.'), r"versions\.optax was '9\."),
    ],
)
def test_a_run_that_is_not_what_it_was_is_refused(unfinished, capsys, edit, words):
    config = unfinished / "config.toml"
    assert edit[0] in config.read_text()
    config.write_text(config.read_text().replace(*edit))
    complaint = said(capsys, "resume", unfinished, code=2)
    assert re.search(rf"can't be resumed.*{words}", complaint)
    assert not (unfinished / "summary.json").exists()


@pytest.mark.parametrize(
    ("edit", "code"), [(("seed = 0", "seed = 3"), 2), (('optax = "', 'optax = "9.'), 0)]
)
def test_force_resumes_under_other_versions_but_not_other_settings(unfinished, capsys, edit, code):
    config = unfinished / "config.toml"
    config.write_text(config.read_text().replace(*edit))
    said(capsys, "resume", unfinished, "--force", "--quiet", code=code)
    assert (unfinished / "summary.json").exists() == (code == 0)


def test_further_refusals(finished, unfinished, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for words, complaint in [
        (["resume", tmp_path / "empty"], "config.toml is missing"),
        (["resume", finished, "--rounds", "2"], "rounds = 2: .* has 4"),
        (["resume", unfinished, "--max-minutes", "0"], "max_minutes = 0.0: must be above 0"),
        (["resume", unfinished, "--round", "9"], "unknown option --round\\b.*--rounds"),
        (["eval", finished, "--split", "validation"], "split = 'validation': the task has no"),
        (["eval", finished, "--params", "first"], "params = 'first': must be last, best or the"),
        (["eval", finished, "--params", "3"], "no checkpoint of round 3: available: .*4"),
        (["export", finished, tmp_path / "x.pt"], r"must end in \.npz or \.safetensors"),
        (["run", *QUICK, "--out", finished], "already contains a run: `fedpa resume .*run`"),
        (["run", *QUICK, "--patience", "0"], "patience = 0: must be a whole number, at least 1"),
        (["run", *QUICK, "--stop-metric", "eval/loss"], "stop_metric = .*: needs patience"),
        (
            ["run", *QUICK, "--target", "1", "--target-metric", "eval/auc"],
            "eval/auc.*report it, but eval",
        ),
        (["run", *QUICK, "--patience", "2", "--stop-metric", "valid/loss"], "don't report it"),
        (["run", *QUICK, "--checkpoint-every", "0"], "checkpoint_every = 0: must be"),
        (
            ["run", *QUICK, "--metrics", "nll,auc"],
            "metrics = 'nll,auc': .*nll, brier, ece, entropy",
        ),
        (["eval", finished, "--metrics", "accuracy"], "metrics = 'accuracy': .*loss, accuracy"),
        (["compare", "--metrics", ",", "--out", tmp_path / "c"], "metrics = ','"),
        (["run", *QUICK, "--init", tmp_path / "no"], "init = .*no': is neither"),
        (["run", *QUICK, "--init-round", "best"], "init_round = 'best': needs --init"),
        (["run", *QUICK, "--log", "papyrus"], "log = 'papyrus': unknown logger"),
        (["resume", tmp_path / "nowhere"], "nowhere' does not exist"),
        (["resume", finished / "config.toml"], "is a file: give the run's directory"),
        (["resume", finished.parent], "is a comparison, not a run: its runs are .*run"),
    ]:
        before = sorted(tmp_path.rglob("*"))
        assert re.search(complaint, said(capsys, *words, code=2)), complaint
        assert sorted(tmp_path.rglob("*")) == before


def test_eval_gives_the_numbers_of_the_run(finished, capsys):
    record = json.loads(said(capsys, "eval", finished, "--json"))
    summary = json.loads((finished / "summary.json").read_text())
    assert record["accuracy"] == summary["test/accuracy"]
    assert record["loss"] == summary["test/loss"]
    assert (record["round"], record["split"], record["examples"]) == (4, "test", 360)
    best = summary["best"]["round"]
    text = said(capsys, "eval", finished, "--params", "best", "--split", "train")
    assert f"round {best}" in text
    assert "1,437 examples of 100 clients" in text
    assert "clients, 10 %" in text


def test_more_metrics_are_recorded_beside_the_tasks_own(finished, tmp_path, capsys):
    out = tmp_path / "more"
    settings = ["--metrics", "NLL, ece", "--validation-share", "0.2", "--out", out]
    stop = ["--patience", "9", "--stop-metric", "valid/ece"]
    said(capsys, "run", *QUICK, *settings, *stop, "--rounds", "2", "--quiet")
    said(capsys, "resume", out, "--rounds", "3", "--quiet")
    first, _, last = fedpa.load(out).metrics
    for record in (first, last):
        assert record["valid/nll"] == record["eval/nll"] == pytest.approx(record["eval/loss"])
        assert 0 <= record["eval/ece"] <= 1
    assert "test/ece" in last
    assert 'metrics = "NLL, ece"' in (out / "config.toml").read_text()
    without = fedpa.load(finished).metrics[-1]
    assert not [name for name in without if name.endswith(("/nll", "/ece"))]
    evaluated = json.loads(said(capsys, "eval", out, "--json"))
    assert evaluated["ece"] == last["test/ece"]
    words = ["--metrics", "brier", "--split", "train", "--json"]
    evaluated = json.loads(said(capsys, "eval", finished, *words))
    assert 0 < evaluated["brier_p10"] < evaluated["brier"] < 1
    assert "nll" not in evaluated


def test_the_evaluation_table_fits(finished):
    console = Console(file=io.StringIO(), width=80)
    model.evaluate([str(finished), "--split", "train"], console)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_export_and_warm_start(finished, tmp_path, capsys, ending):
    path = tmp_path / f"model{ending}"
    assert f"parameters of round 4 written to {path}" in said(capsys, "export", finished, path)
    stored = load_file(path) if ending == ".safetensors" else dict(np.load(path))
    assert sorted(stored) == sorted(np.load(finished / "params.npz").files)
    for name, array in np.load(finished / "params.npz").items():
        assert stored[name].dtype == np.float32
        assert np.array_equal(stored[name], array)
    complaint = said(capsys, "export", finished, path, code=2)
    assert path.name in complaint
    out = tmp_path / "warm"
    said(capsys, "run", *QUICK, "--rounds", "2", "--init", path, "--quiet", "--out", out)
    assert np.array_equal(np.load(out / "init.npz")["layers/0/bias"], stored["layers/0/bias"])
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    cold = json.loads((finished / "metrics.jsonl").read_text().splitlines()[0])
    assert first["train/loss"] < cold["train/loss"]


def test_a_warm_start_of_other_shapes_is_refused(finished, tmp_path, capsys):
    arrays = dict(np.load(finished / "params.npz"))
    wrong = arrays | {"layers/0/weight": np.zeros((3, 64), np.float32)}
    np.savez(tmp_path / "wrong.npz", **wrong)
    complaint = said(capsys, "run", *QUICK, "--init", tmp_path / "wrong.npz", code=2)
    assert re.search(r"layers/0/weight has shape \[3, 64\]: this model needs \[", complaint)
    del wrong["layers/0/weight"]
    np.savez(tmp_path / "less.npz", **wrong)
    complaint = said(capsys, "run", *QUICK, "--init", tmp_path / "less.npz", code=2)
    assert re.search(r"less\.npz'.*; .*layers/0/weight", complaint)
    np.savez(tmp_path / "nan.npz", **arrays | {"layers/0/bias": arrays["layers/0/bias"] * np.nan})
    complaint = said(capsys, "run", *QUICK, "--init", tmp_path / "nan.npz", code=2)
    assert "layers/0/bias has a value that is not finite" in complaint


def test_a_target_ends_a_run(finished, tmp_path, capsys):
    words = ["run", *QUICK, "--target", "0.01", "--target-window", "2", "--out", tmp_path / "run"]
    text = said(capsys, *words)
    assert "ended after round 2: target reached: the 2-round average of eval/accuracy" in text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped"].startswith("target reached")
    assert summary["round"] == 2
    assert "already finished" in said(capsys, "resume", tmp_path / "run")


def test_config_toml_says_what_the_run_was_made_with(finished):
    text = (finished / "config.toml").read_text()
    for name, version in provenance.versions().items():
        assert f'{name} = "{version}"' in text
    assert re.search(r'^data = "[0-9a-f]{32}"$', text, re.MULTILINE)


def test_loading_an_unfinished_run(unfinished):
    run = fedpa.load(unfinished)
    assert run.round == 2
    assert run.problem is not None
    assert list_checkpoints(unfinished)[-1] == 2


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where tests run in background
from fedpa.experiments.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)],
)
def test_ctrl_c_saves_and_says_how_to_resume(tmp_path, capsys, sent, code):
    words = ["run", *QUICK, "--rounds", "100000", "--checkpoint-every", "90000", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 4000):
            pass
        process.send_signal(sent)
        _, complaint = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == code
    found = re.fullmatch(
        r"interrupted after round (\d+): `fedpa resume run` continues it\n", complaint
    )
    assert found, complaint
    assert list_checkpoints(tmp_path / "run")[-1] == int(found[1])
