"""What people see of `fedpa.fit`: its progress, its result, its end by Ctrl-C, its config.toml."""

import io
import sys
import tomllib
import traceback

import jax.numpy as jnp
import optax
import pytest

import fedpa
from fedpa import LocalTraining, Server, server
from fedpa.objectives import least_squares
from tests.federations import least_squares_clients

CLIENTS = least_squares_clients(sizes=(20, 8))
LOCAL = LocalTraining(optax.sgd(0.05, momentum=0.9), batch_size=8, epochs=3)
SIDE = Server(server.sgd(0.5))
METHOD = fedpa.fedavg(LOCAL, SIDE)
ENGINE = fedpa.engines.per_client()


def fit(method=METHOD, **options):
    settings = {"rounds": 3, "clients_per_round": 2, "engine": ENGINE}
    settings |= {"evaluate": lambda params: {"sum": float(params.sum())}}
    return fedpa.fit(least_squares.loss, jnp.zeros(3), CLIENTS, method, **settings | options)


def test_a_result_is_printed_in_a_few_lines():
    result = fit(best="eval/sum")
    text = str(result)
    assert text == repr(result)
    assert len(text.splitlines()) <= 10
    best = f"eval/sum {result.best['value']:.4g} in round {result.best['round']}"
    for words in ("rounds      3 in ", "after its last round", "train/loss ", best, "3 numbers"):
        assert words in text


@pytest.mark.parametrize(("progress", "lines"), [(True, 3), (None, 0), (False, 0)])
def test_progress_is_lines_where_there_is_no_terminal(capsys, progress, lines):
    fit(progress=progress)
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == lines
    assert not shown.out
    if lines:
        assert shown.err.splitlines()[-1].startswith("round 3/3  train/loss ")


def test_long_runs_have_ten_lines():
    from fedpa.training.callbacks import Event
    from fedpa.training.fit import show_progress

    written, kept = io.StringIO(), sys.stderr
    sys.stderr = written
    try:
        with show_progress(True) as (callback,):
            for t in range(1, 1001):
                callback(Event(t, 1000, None, None, {"train/loss": 0.5}))
    finally:
        sys.stderr = kept
    assert len(written.getvalue().splitlines()) == 10


@pytest.mark.parametrize(("progress", "is_shown"), [(None, True), (False, False)])
def test_progress_is_a_bar_on_a_terminal(monkeypatch, progress, is_shown):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    fit(progress=progress)
    assert ("3/3" in terminal.getvalue()) == is_shown


def interrupt(event):
    if event.round == 2:
        raise KeyboardInterrupt


def test_ctrl_c_is_short_and_says_how_to_resume(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=r"after round 1 of 3: the same call.*run'") as said:
        fit(out=out, callbacks=[interrupt])
    frames = traceback.extract_tb(said.value.__traceback__)
    assert len([frame for frame in frames if "/fedpa/training/" in frame.filename]) <= 2
    assert said.value.__context__ is None
    done = []
    fit(out=out, callbacks=[lambda event: done.append(event.round)])
    assert done == [2, 3]
    with pytest.raises(KeyboardInterrupt, match="after round 1 of 3: nothing is kept"):
        fit(callbacks=[interrupt])


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
