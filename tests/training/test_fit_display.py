"""What people see of `fedpa.fit`: progress, result, labels, its end by Ctrl-C, its config.toml."""

import io
import json
import os
import signal
import subprocess
import sys
import tomllib
import traceback
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.objectives import least_squares
from fedpa.training import checkpoint as checkpointing
from fedpa.training.callbacks import Event
from fedpa.training.fit import label_method, show_progress
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 8))
LOCAL = LocalTraining(optax.sgd(0.05, momentum=0.9), batch_size=8, epochs=3)
SIDE = Server(server.sgd(0.5))
METHOD = fedpa.fedavg(LOCAL, SIDE)
ENGINE = fedpa.engines.per_client()


def fit(method=METHOD, **options):
    settings = {"rounds": 3, "clients_per_round": 2, "engine": ENGINE, "progress": False}
    settings |= {"evaluate": lambda params: {"sum": float(params.sum())}}
    return fedpa.fit(least_squares.loss, jnp.zeros(3), CLIENTS, method, **settings | options)


def printed(result):
    """The lines of a result by their first words."""
    assert str(result) == repr(result)
    first, *lines = str(result).splitlines()
    assert len(lines) < 10
    return first, dict(line.strip().split(maxsplit=1) for line in lines)


def test_a_result_is_printed_in_a_few_lines(tmp_path):
    recording = fedpa.RecordingOptions(best=fedpa.Best("eval/sum", lower=True), label="mine")
    method = fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=1)
    result = fit(method, recording=recording, out=tmp_path / "run")
    first, lines = printed(result)
    assert first == "mine: 3 parameters"
    assert lines["rounds"] == "3: 1 of burn-in, 2 of sampling"
    assert lines["ended"] == "after its last round"
    last, best = result.history[-1], result.best
    assert best["value"] == min(record["eval/sum"] for record in result.history)
    assert lines["eval/sum"] == (
        f"{last['eval/sum']:.4g} (best {best['value']:.4g} in round {best['round']})"
    )
    assert lines["train/loss"].startswith(f"{last['train/loss']:.4g} (best ")
    assert lines["failures"] == "none"
    sent = sum(record["comm/bytes_up"] for record in result.history)
    assert lines["traffic"].startswith(f"{sent} bytes up, ")
    assert lines["recorded"] == repr(str(result.out)) == repr(str(tmp_path / "run"))
    assert "eval/sum" in str(fit(method, out=tmp_path / "run", recording=recording))  # finished


def test_a_result_has_ten_lines_whatever_is_measured():
    metrics = dict.fromkeys("abcdefgh", 1.0)
    huge = np.full(20, 1e30, np.float32)  # its gradient is not finite
    bad = CLIENTS | {"bad": {"x": np.stack([huge] * 3, axis=1), "y": huge}}
    pause = lambda event: fedpa.Stop("later", finished=False) if event.round == 2 else None  # noqa: E731
    with pytest.warns(UserWarning, match="rejected.*bad"):
        result = fedpa.fit(
            least_squares.loss,
            jnp.zeros(3),
            bad,
            METHOD,
            rounds=3,
            clients_per_round=3,
            engine=ENGINE,
            evaluate=lambda params: metrics,
            callbacks=[pause],
            progress=False,
        )
    first, lines = printed(result)
    assert first == "FedAvg: 3 parameters"
    assert len(lines) == 9
    assert lines["ended"] == "later (can be resumed)"
    assert lines["failures"] == "2 client updates, in 2 of 2 rounds"
    assert lines["…"].startswith("7 more metrics")
    assert lines["recorded"] == "no"


def test_runs_and_checkpoints_are_printed_in_a_few_lines(tmp_path):
    out, metrics = tmp_path / "run", dict.fromkeys("abcdefgh", 1.0)
    fit(out=out, evaluate=lambda params: metrics)
    run, checkpoint = fedpa.load(out), fedpa.load_checkpoint(out)
    first, lines = printed(run)
    assert first == "Run"
    assert lines["params"] == "3 parameters, of round 3"
    assert "label = 'FedAvg'" in lines["config"]
    assert lines["metrics"] == "3 rounds"
    assert lines["train/loss"].startswith(f"{run.metrics[-1]['train/loss']:.4g} (best ")
    first, lines = printed(checkpoint)
    assert first == "Checkpoint of round 3"
    assert "theta (3)" in lines["state"]
    assert lines["history"] == "3 rounds"
    filled = METHOD(fedpa.Objective(least_squares.loss)).init(jnp.zeros(3))
    assert "theta (3)" in str(fedpa.load_checkpoint(out, like=filled))
    assert "state" in printed(checkpoint._replace(state={str(k): 1.0 for k in range(99)}))[1]


def test_a_finished_run_that_is_returned_says_so(tmp_path, capsys):
    out = tmp_path / "run"
    fit(out=out)
    fit(out=out)
    assert not capsys.readouterr().err
    fit(out=out, progress=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("FedAvg ")
    assert "round 3" in line
    assert repr(str(out)) in line


def own_method(objective):
    return METHOD(objective)


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (METHOD, "FedAvg"),
        (fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=3), "FedPA, ρ = 0.1"),
        (fedpa.fedpa(LOCAL, SIDE, rho="oas"), "FedPA, ρ = oas"),
        (fedpa.fedprox(LOCAL, SIDE, proximal=0.2), "FedProx, proximal = 0.2"),
        (fedpa.global_precision(METHOD), "global precision"),
        (own_method, "own_method"),
        (lambda objective: METHOD(objective), "your own method"),
        (fedpa.fedpa(LOCAL, SIDE, delta=fedpa.deltas.mean()), "FedPA, own delta"),
    ],
)
def test_labels_follow_from_methods(method, label):
    assert label_method(method) == label


@pytest.mark.parametrize(("progress", "lines"), [(True, 4), (False, 0)])
def test_progress_is_lines_where_there_is_no_terminal(capsys, progress, lines):
    fit(progress=progress, recording=fedpa.RecordingOptions(label="{0} [mine]"))
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == lines
    assert not shown.out
    if lines:
        last = shown.err.splitlines()[-1]
        assert last.startswith("{0} [mine]  round 3/3  train/loss ")
        assert "eval/sum" in last


def test_a_phase_is_named_while_it_is_compiled(capsys):
    method = fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=1)
    fit(method, progress=True)
    lines = [line.split("  ")[1:3] for line in capsys.readouterr().err.splitlines()]
    assert [line[0] for line in lines] == [f"round {t}/3" for t in (1, 1, 2, 2, 3)]
    assert "compiling" in lines[0][1]
    assert "burn-in" in lines[0][1]
    assert "compiling" in lines[2][1]
    assert "sampling" in lines[2][1]


def test_the_bar_names_a_phase_while_it_is_compiled(monkeypatch):
    terminal = open_terminal(monkeypatch, 160)
    with show_progress(True, "mine") as (callback,):
        callback.begin(1, 30, "burn-in")
        callback(Event(1, 30, None, None, {"train/loss": 0.5}))
        callback.begin(2, 30, "sampling")
    shown = terminal.getvalue()
    assert "1/30" in shown
    assert "sampling" in shown


def test_long_runs_have_ten_lines():
    written, kept = io.StringIO(), sys.stderr
    sys.stderr = written
    try:
        with show_progress(True, "mine") as (callback,):
            for t in range(1, 1001):
                callback(Event(t, 1000, None, None, {"train/loss": 0.5}))
    finally:
        sys.stderr = kept
    assert len(written.getvalue().splitlines()) == 10


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch, width):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    return terminal


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_bar_never_cuts_the_count(monkeypatch, width):
    terminal = open_terminal(monkeypatch, width)
    record = {"train/loss": 0.1234, "eval/accuracy": 0.8321, "eval/loss": 0.8321}
    with show_progress(True, "FedPA, ρ = 0.1") as (callback,):
        for t in (1, 4000):
            callback(Event(t, 4000, None, None, record))
    assert "4000/4000" in terminal.getvalue()
    assert "train/loss" in terminal.getvalue()


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (False, False)])
def test_progress_is_a_bar_on_a_terminal(monkeypatch, progress, is_shown):
    terminal = open_terminal(monkeypatch, 160)
    fit(progress=progress, recording=fedpa.RecordingOptions(label="{0} [mine]"))
    for words in ("{0} [mine]", "3/3", "train/loss", "eval/sum", "0:00:00"):
        assert (words in terminal.getvalue()) == is_shown, words


def interrupt(event):
    if event.round == 2:
        raise KeyboardInterrupt


def test_ctrl_c_is_short_and_says_how_to_resume(tmp_path):
    out = tmp_path / "run"
    again = "evaluate=evaluate, callbacks=callbacks, engine=engine"
    call = rf"fedpa\.resume\('.*run', loss, params, clients, method, {again}\)"
    with pytest.raises(KeyboardInterrupt, match=rf"after round 1 of 3: {call}") as said:
        fit(out=out, callbacks=[interrupt])
    frames = traceback.extract_tb(said.value.__traceback__)
    assert len([frame for frame in frames if "/fedpa/training/" in frame.filename]) <= 2
    assert said.value.__context__ is None
    done = []
    fit(out=out, callbacks=[lambda event: done.append(event.round)])
    assert done == [2, 3]
    with pytest.raises(KeyboardInterrupt, match="after round 1 of 3: nothing is kept"):
        fit(callbacks=[interrupt])


@pytest.mark.parametrize("evaluate", [None, lambda params: {"sum": float(params.sum())}])
def test_the_call_that_ctrl_c_names_resumes(tmp_path, monkeypatch, evaluate):
    def stop(*given, **settings):
        raise KeyboardInterrupt

    given = {"rounds": 2, "clients_per_round": 2, "progress": False, "evaluate": evaluate}
    own = {"loss": least_squares.loss, "params": jnp.zeros(3), "clients": CLIENTS, "method": METHOD}
    monkeypatch.setattr("fedpa.training.run.train", stop)
    with pytest.raises(KeyboardInterrupt) as said:
        fedpa.fit(*own.values(), **given, out=tmp_path / "run")
    monkeypatch.undo()
    call = str(said.value).partition(": ")[2].removesuffix(" resumes it")
    resumed = eval(call.replace(")", ", progress=False)"), {"fedpa": fedpa, **own, **given})
    assert len(resumed.history) == 2
    assert ("evaluate" in call) == (evaluate is not None)
    assert "callbacks" not in call


INTERRUPTED = """
import os, signal, sys
import jax.numpy as jnp, fedpa
from tests.federations import least_squares_clients
from fedpa.objectives import least_squares

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's ignores it
method = fedpa.fedavg(fedpa.LocalTraining(0.05, 8), fedpa.Server(fedpa.server.sgd(0.5)))
fedpa.fit(least_squares.loss, jnp.zeros(3), least_squares_clients(sizes=(20, 8)), method,
          rounds=9, clients_per_round=2, out=sys.argv[1], engine=fedpa.engines.per_client(),
          callbacks=[lambda e: os.kill(os.getpid(), signal.SIGINT) if e.round == 3 else None])
"""


def test_ctrl_c_in_a_script_is_a_few_lines(tmp_path):
    """As Python shows it: where `fit` was called, and how to resume."""
    (tmp_path / "script.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGINT
    shown = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert len(shown) <= 12, done.stderr
    assert shown[-1].startswith("KeyboardInterrupt: after round ")
    assert checkpointing.list_checkpoints(tmp_path / "run")[-1] in (2, 3)


def config(out, method):
    fit(method, out=out)
    return tomllib.loads((out / "config.toml").read_text())


def test_config_toml_says_which_method_with_which_settings(tmp_path):
    posterior = fedpa.fedpa(LOCAL, SIDE, rho=0.1, burn_in_rounds=1)
    found = config(tmp_path / "run", posterior)
    assert (found["method"], found["engine"]) == ("fedpa", "per-client")
    expected = {"rho": 0.1, "burn_in_rounds": 1, "epochs": 3, "batch_size": 8}
    expected |= {"client_step": 0.05, "server_step": 0.5, "weighting": "examples"}
    assert expected.items() <= found["hyperparameters"].items()
    assert found["label"] == "FedPA, ρ = 0.1"
    assert found["model"] == {"parameters": 3, "bytes": 12}
    assert found["federation"] == {"clients": 2, "examples": 28}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["label"] == found["label"]


@pytest.mark.parametrize(
    ("method", "name", "settings"),
    [
        (fedpa.scaffold(LOCAL, SIDE), "scaffold", {"epochs": 3}),
        (fedpa.fedprox(LOCAL, SIDE, proximal=0.2), "fedprox", {"proximal": 0.2}),
        (fedpa.global_precision(METHOD), "global-precision", {"numerator": "fedavg", "epochs": 3}),
    ],
)
def test_methods_say_what_they_are(method, name, settings):
    assert method.name == name
    assert settings.items() <= method.settings().items()
