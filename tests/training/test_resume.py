"""A run that was cut at any point and resumed is the run that was not cut, bit for bit."""

import dataclasses
import errno
import hashlib
import json
import re
import shutil
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import fedpa
from fedpa import FedpaError, LocalTraining, Server, server
from fedpa.algorithms.methods import Described
from fedpa.objectives import least_squares
from fedpa.training import (
    Best,
    RecordingOptions,
    early_stopping,
    named_arrays,
    provenance,
    run_directory,
    stop_at,
)
from fedpa.training import checkpoint as checkpointing
from fedpa.training.loop import Snapshot
from fedpa.training.problem import prepare
from fedpa.training.run_directory import lock_directory
from tests.federations import least_squares_federation, trees_equal
from tests.refusals import refused

CLIENTS, _, POSTERIOR = least_squares_federation(sizes=(20, 8, 30, 12))
X, Y = (np.concatenate([c[k] for c in CLIENTS.values()]) for k in ("x", "y"))
LOCAL = LocalTraining(optax.sgd(0.05), batch_size=8, epochs=2)
ROUNDS = 6


def posterior_averaging(rate=0.1):
    """All that may be in a server's state: moments, a count, an average; and a switch of phase."""
    side = Server(server.adam(rate), averaging=server.averaging.polyak())
    return fedpa.fedpa(LOCAL, side, rho=0.1, burn_in_rounds=3)


# One engine and one algorithm for all: what one test compiles serves the next.
ENGINE = fedpa.engines.local()
OBJECTIVE = fedpa.Objective(least_squares.loss)
ALGORITHMS = {
    "fedpa": posterior_averaging()(OBJECTIVE),
    "scaffold": fedpa.scaffold(LOCAL, Server(server.sgd(1.0)), population=70)(OBJECTIVE),
}
METHODS = {name: lambda objective, name=name: ALGORITHMS[name] for name in ALGORITHMS}


def evaluate(params):
    return {"mse": np.mean((X @ np.asarray(params) - Y) ** 2)}


def fit(out, method="fedpa", **options):
    settings = {"rounds": ROUNDS, "clients_per_round": 2, "evaluate": evaluate, "eval_every": 4}
    settings |= {"best": Best("eval/mse", lower=True), "out": out, "engine": ENGINE}
    settings |= {"progress": False, "recording": RecordingOptions(checkpoint_every=2)} | options
    recording = {
        name: settings.pop(name) for name in ("best", "overwrite", "force") if name in settings
    }
    settings["recording"] = dataclasses.replace(settings["recording"], **recording)
    model = METHODS[method] if isinstance(method, str) else method
    loss, params = settings.pop("loss", least_squares.loss), settings.pop("params", jnp.zeros(3))
    return fedpa.fit(loss, params, settings.pop("clients", CLIENTS), model, **settings)


def without_seconds(records):
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


def left(out):
    """What a run leaves, but for its times."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    summary = json.loads((out / "summary.json").read_text())
    return (
        without_seconds([json.loads(line) for line in lines]),
        {k: v for k, v in summary.items() if k != "seconds"},
        dict(np.load(out / "params.npz")),
    )


def assert_same_run(one, other):
    for a, b in zip(left(one)[:2], left(other)[:2], strict=True):
        assert a == b
    assert trees_equal(left(one)[2], left(other)[2])


def cut(tmp_path_factory, method, **options):
    """A finished run, and for each of its rounds what a kill in it would have left."""
    root = tmp_path_factory.mktemp(f"cut-{method}")

    def copy(event):
        shutil.copytree(root / "whole", root / f"in-round-{event.round}")

    return root, fit(root / "whole", method, callbacks=[copy], **options)


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory):
    return {method: cut(tmp_path_factory, method) for method in METHODS}


def copy_of(runs, tmp_path, name, method="fedpa"):
    return shutil.copytree(runs[method][0] / name, tmp_path / "run")


@pytest.mark.parametrize("t", [1, 3, 4, 6])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_in_any_round_ends_as_one_that_was_not(runs, tmp_path, method, t):
    root, whole = runs[method]
    out = copy_of(runs, tmp_path, f"in-round-{t}", method)
    checkpoint = 2 * ((t - 1) // 2)
    assert checkpointing.list_checkpoints(out)[-1:] == ([checkpoint] if checkpoint else [])
    done = []
    again = fit(out, method, callbacks=[lambda event: done.append(event.round)])
    assert done == list(range(checkpoint + 1, ROUNDS + 1))
    assert_same_run(root / "whole", out)
    assert without_seconds(again.history) == without_seconds(whole.history)
    assert trees_equal(again.state, whole.state)
    assert trees_equal(again.params, whole.params)


def test_it_is_the_run_that_nobody_recorded(runs):
    plain = fit(None)
    assert without_seconds(plain.history) == without_seconds(runs["fedpa"][1].history)
    assert trees_equal(plain.params, runs["fedpa"][1].params)


def test_killed_again_and_again(runs, tmp_path):
    """Each resumption is killed in the round after the checkpoint it started from."""
    root, _ = runs["scaffold"]
    out = copy_of(runs, tmp_path, "in-round-1", "scaffold")
    for attempt in range(ROUNDS):
        left_behind = tmp_path / f"attempt-{attempt}"

        def copy_once(event, out=out, left_behind=left_behind, seen=[]):  # noqa: B006
            seen.append(event.round)
            if len(seen) == 3:
                shutil.copytree(out, left_behind)

        fit(out, "scaffold", callbacks=[copy_once])
        if not left_behind.exists():
            break
        out = left_behind
    assert attempt == 2  # two rounds of progress each, at a checkpoint every two
    assert_same_run(root / "whole", out)


@pytest.mark.parametrize("damage", ["torn", "longer", "gone", "short", "binary"])
def test_the_metrics_file_may_be_in_any_state(runs, tmp_path, damage):
    out = copy_of(runs, tmp_path, "in-round-6")
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    content = {
        "torn": b"".join(lines[:4]) + lines[4][:40],
        "longer": b"".join([*lines, lines[-1], b'{"round": 7}\n']),
        "short": lines[0][:-10],
        "binary": b"\x00\xff" * 20,
    }
    path.unlink() if damage == "gone" else path.write_bytes(content[damage])
    fit(out)
    assert_same_run(runs["fedpa"][0] / "whole", out)


def _halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", ["empty", "no arrays", "no about", "cut", "flipped", "all"])
def test_a_half_written_checkpoint_is_passed_over(runs, tmp_path, damage):
    out = copy_of(runs, tmp_path, "in-round-6")
    assert checkpointing.list_checkpoints(out) == [2, 4]
    last = out / "checkpoints" / "4"
    data = max((p for p in last.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if damage == "empty":
        shutil.rmtree(last)
        last.mkdir()
    elif damage == "no arrays":
        (last / "state.safetensors").unlink()
    elif damage == "no about":
        (last / "state.json").unlink()
    elif damage == "cut":
        _halve(data)
    elif damage == "flipped":
        _flip(data)
    else:
        for path in out.glob("checkpoints/*/*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.warns(UserWarning, match=r"checkpoint .*[24]' (can't be read|is damaged)") as told:
        fit(out)
    assert len(told) == (2 if damage == "all" else 1)
    assert_same_run(runs["fedpa"][0] / "whole", out)


def test_what_a_kill_left_of_a_checkpoint_is_removed(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    shutil.copytree(out / "checkpoints" / "4", out / "checkpoints" / "6.part")
    fit(out)
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert_same_run(runs["fedpa"][0] / "whole", out)


def tree(out):
    return {
        str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_a_finished_run_is_given_back_and_not_touched(runs, tmp_path):
    out = copy_of(runs, tmp_path, "whole")
    before = tree(out)

    def never(event):
        raise AssertionError("it has no rounds left")

    again = fit(out, callbacks=[never])
    assert tree(out) == before
    whole = runs["fedpa"][1]
    assert again.history == whole.history
    assert trees_equal(again.params, whole.params)
    assert trees_equal(again.state, whole.state)
    with pytest.raises(FedpaError, match=r"rounds = 5: .* has 6"):
        fit(out, rounds=5)
    assert tree(out) == before


def test_more_rounds_extend_it_to_the_longer_run(runs, tmp_path):
    """Also where the short run's last round was evaluated only for being the last."""
    out = copy_of(runs, tmp_path, "whole")
    assert "eval/mse" in runs["fedpa"][1].history[-1]
    fit(out, rounds=9)
    longer = fit(tmp_path / "longer", rounds=9)
    assert_same_run(tmp_path / "longer", out)
    assert [r["round"] for r in longer.history if "eval/mse" in r] == [4, 8, 9]


def scripted(values):
    """An evaluation that gives these values in turn."""
    given = iter(values)
    return lambda params: {"mse": next(given)}


def test_the_best_round_may_be_the_last_which_is_evaluated_for_being_the_last(tmp_path):
    """Of 6 rounds, 4 and 6 are evaluated. Extended, round 6 is one of many, and 4 is the best."""
    out, seen = tmp_path / "run", []
    note = lambda event: seen.append((event.round, event.record.get("eval/mse")))  # noqa: E731
    few = RecordingOptions(checkpoint_every=99, keep_checkpoints=1)
    short = fit(out, evaluate=scripted([2.0, 1.0]), callbacks=[note], recording=few)
    assert seen[3:] == [(4, 2.0), (5, None), (6, 1.0)]
    assert short.best == {"metric": "eval/mse", "value": 1.0, "round": 6}
    assert left(out)[1]["best"] == short.best
    best = fedpa.load(out, "best", jnp.zeros(3))
    assert best.round == 6
    assert checkpointing.list_checkpoints(out) == [4, 6]
    assert trees_equal(best.params, short.params)
    assert fit(out, evaluate=None, recording=few).best == short.best  # given back
    seen.clear()
    longer = fit(out, evaluate=scripted([4.0, 3.0]), callbacks=[note], recording=few, rounds=9)
    assert seen == [(6, None), (7, None), (8, 4.0), (9, 3.0)]
    assert longer.best == {"metric": "eval/mse", "value": 2.0, "round": 4}
    whole = tmp_path / "whole"
    fit(whole, evaluate=scripted([2.0, 4.0, 3.0]), recording=few, rounds=9)
    assert_same_run(whole, out)
    assert checkpointing.list_checkpoints(whole) == checkpointing.list_checkpoints(out) == [4, 9]
    assert fedpa.load(out, "best").round == 4


def test_a_round_that_a_callback_makes_the_last_is_evaluated_and_may_be_the_best(tmp_path):
    end = lambda event: fedpa.Stop("enough") if event.round == 5 else None  # noqa: E731
    ended = fit(tmp_path / "run", evaluate=scripted([2.0, 1.0]), callbacks=[end])
    assert ended.history[-1]["eval/mse"] == 1.0
    assert ended.best["round"] == fedpa.load(tmp_path / "run", "best").round == 5
    assert fit(None, evaluate=scripted([2.0]), eval_every=9, rounds=5).best["round"] == 5


@pytest.mark.parametrize(
    ("every", "more", "evaluated"), [(4, [0.5, 0.4], [4, 8, 9]), (3, [2.0], [3, 6])]
)
@pytest.mark.long
def test_what_ends_a_run_in_its_last_round_need_not_end_a_longer_one(
    tmp_path, every, more, evaluated
):
    """A longer run evaluates round 6 if it is its turn, and only then is it ended there, too."""

    def run(name, values, rounds):
        stop = early_stopping("eval/mse", patience=1, lower=True)
        options = {"evaluate": scripted(values), "eval_every": every, "rounds": rounds}
        return fit(tmp_path / name, callbacks=[stop], **options)

    first = run("run", [1.0, 2.0], 6)
    assert first.stopped.startswith("early stopping")
    assert run("run", [], 6).stopped == first.stopped
    longer = run("run", more, 9)
    assert [record["round"] for record in longer.history if "eval/mse" in record] == evaluated
    run("whole", [1.0, *more], 9)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_early_stopping_and_targets_go_on_counting(tmp_path_factory):
    """Stopped in round 5 by evaluations 3, 4 and 5; killed in between it must be round 5 again."""
    values = iter([3.0, 2.0, 2.5, 2.5, 2.5, 2.5] * 9)
    stop = early_stopping("eval/mse", patience=3, lower=True)
    far = stop_at("eval/mse", target=-1.0, window=2, lower=True)

    def scripted(params):
        return {"mse": next(values)}

    root = tmp_path_factory.mktemp("stopping")

    def copy(event):
        shutil.copytree(root / "whole", root / f"in-round-{event.round}")

    def stopping_run(out, copying=()):
        options = {"evaluate": scripted, "eval_every": 1, "callbacks": [stop, far, *copying]}
        return fit(out, rounds=9, best=None, **options)

    whole = stopping_run(root / "whole", [copy])
    assert len(whole.history) == 5
    assert whole.stopped.startswith("early stopping: eval/mse ")
    assert "best 2 in round 2" in whole.stopped
    memory = checkpointing.read_checkpoint(root / "whole", 5).memory
    assert memory["early_stopping eval/mse"] == {"value": 2.0, "round": 2, "waited": 3}
    values = iter([2.5] * 9)  # rounds 3 and on, behind the checkpoint of round 2
    again = stopping_run(root / "in-round-4")
    assert len(again.history) == 5
    assert again.stopped == whole.stopped
    values = iter([])
    assert stopping_run(root / "in-round-4").stopped == whole.stopped  # finished


def test_the_best_round_keeps_its_checkpoint(tmp_path):
    values, after = iter([5.0, 1.0, 4.0, 3.0, 2.0, 6.0]), []
    fit(
        tmp_path / "run",
        callbacks=[lambda event: after.append(event.params)],
        evaluate=lambda params: {"mse": next(values)},
        eval_every=1,
        recording=RecordingOptions(checkpoint_every=1, keep_checkpoints=2),
    )
    assert checkpointing.list_checkpoints(tmp_path / "run") == [2, 5, 6]
    best = fedpa.load(tmp_path / "run", "best")
    assert best.round == 2
    assert trees_equal(best.params["theta"], after[1])
    filled = fedpa.load(tmp_path / "run", params=jnp.zeros(3))
    assert trees_equal(filled.params, fit(None).params)
    assert [record["round"] for record in filled.metrics] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(FedpaError, match="no checkpoint of round 3: available: 2, 5, 6"):
        fedpa.load(tmp_path / "run", 3)


def test_a_best_round_between_checkpoints_is_kept_too(tmp_path):
    values = iter([5.0, 4.0, 1.0, 3.0, 2.0, 6.0])
    fit(
        tmp_path / "run",
        evaluate=lambda params: {"mse": next(values)},
        eval_every=1,
        recording=RecordingOptions(checkpoint_every=4, keep_checkpoints=1),
    )
    assert checkpointing.list_checkpoints(tmp_path / "run") == [3, 6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"clients_per_round": 3}, "clients_per_round was 2 and is 3"),
        ({"method": posterior_averaging(rate=0.2)}, "the loss have changed"),
        ({"loss": lambda *given: 2 * least_squares.loss(*given)}, "the loss have changed"),
        ({"params": jnp.ones(3)}, "exactly: the initial parameters"),
        ({"clients": CLIENTS | {"client-0001": CLIENTS["client-0000"]}}, "exactly: the data"),
        ({"clients": {"z": CLIENTS["client-0000"]}}, "exactly: the data"),
    ],
)
@pytest.mark.parametrize("left", ["in-round-6", "whole"])
@pytest.mark.filterwarnings("ignore:clients_per_round")
def test_a_run_of_other_settings_or_data_is_refused(runs, tmp_path, change, words, left):
    out = copy_of(runs, tmp_path, left)
    before = tree(out)
    with pytest.raises(FedpaError, match=f"can't be resumed.*{words}"):
        fit(out, **change)
    before.pop(".lock")
    assert {name: file for name, file in tree(out).items() if name != ".lock"} == before


def test_a_finished_run_is_refused_by_resume_for_other_data(runs, tmp_path):
    out = copy_of(runs, tmp_path, "whole")
    own = (least_squares.loss, jnp.zeros(3))
    other = {"z": CLIENTS["client-0000"]}
    with refused(str(out), "the data"):
        fedpa.resume(out, *own, other, METHODS["fedpa"], progress=False)
    with refused(str(out), "the initial parameters"):
        fedpa.resume(out, own[0], jnp.ones(3), CLIENTS, METHODS["fedpa"], progress=False)
    given = fedpa.resume(out, *own, other, METHODS["fedpa"], force=True, progress=False)
    assert given.history == runs["fedpa"][1].history


def test_a_finished_run_is_returned_on_another_machine(runs, tmp_path, monkeypatch):
    out = copy_of(runs, tmp_path, "whole")
    for name, now in (("versions", {"jax": "0"}), ("source_fingerprint", "0"), ("machine", {})):
        monkeypatch.setattr(provenance, name, lambda now=now: now)
    assert fit(out).history == runs["fedpa"][1].history


def test_refusals_name_what_fit_takes(runs, tmp_path):
    out = copy_of(runs, tmp_path, "whole")
    with refused(str(out), "seed was 0 and is 1", "RecordingOptions(overwrite=True"):
        fit(out, seed=1)
    with refused(str(out), "the data", "RecordingOptions(force=True"):
        fit(out, clients={"z": CLIENTS["client-0000"]})
    (out / "config.toml").unlink()
    with refused(f"out = {str(out)!r}", "RecordingOptions(overwrite=True"):
        fit(out)
    (tmp_path / "model.npz").touch()
    with refused(f"path = {str(tmp_path / 'model.npz')!r}", "overwrite=True"):
        fedpa.export(out, tmp_path / "model.npz")


def test_a_run_is_begun_anew_if_told(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    (out / "notes.txt").write_text("mine")
    done = []
    fit(out, overwrite=True, callbacks=[lambda event: done.append(event.round)])
    assert done == [1, 2, 3, 4, 5, 6]
    assert (out / "notes.txt").read_text() == "mine"
    assert_same_run(runs["fedpa"][0] / "whole", out)


def test_another_version_is_refused_unless_told(runs, tmp_path, monkeypatch):
    out = copy_of(runs, tmp_path, "in-round-6")
    now = provenance.versions() | {"jax": "0.0.1"}
    monkeypatch.setattr(provenance, "versions", lambda: now)
    with pytest.raises(FedpaError, match=r"versions\.jax was .* and is '0\.0\.1' .*Options\(force"):
        fit(out)
    fit(out, force=True)
    assert_same_run(runs["fedpa"][0] / "whole", out)
    _, made = run_directory.read_config(out)
    assert made["changed"][0].startswith("after round 4: versions.jax was ")
    monkeypatch.undo()
    fit(out)  # finished: nothing is computed, so versions don't matter


def test_two_runs_can_not_share_a_directory(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    with lock_directory(out), pytest.raises(FedpaError, match="is being written by process"):
        fit(out)
    fit(out)
    assert_same_run(runs["fedpa"][0] / "whole", out)


@pytest.mark.parametrize("step", ["write_bytes", "write_text", "mkdir", "rename"])
def test_a_full_disk_leaves_the_last_good_checkpoint(runs, tmp_path, monkeypatch, step):
    real = getattr(Path, step)

    def full(self, *args, **options):
        if "4.part" in self.parts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **options)

    monkeypatch.setattr(Path, step, full)
    words = r"round 4 can't be written .*: No space left on device; round 2 is the last good one"
    with pytest.raises(FedpaError, match=words):
        fit(tmp_path / "run")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]
    fit(tmp_path / "run")
    assert_same_run(runs["fedpa"][0] / "whole", tmp_path / "run")


@pytest.mark.parametrize("step", ["write_bytes", "write_text", "mkdir", "rename"])
def test_a_save_that_is_broken_off_is_done_again(runs, tmp_path, monkeypatch, step):
    """Ctrl-C in the middle of a checkpoint: nothing half is left, and the round is saved."""
    real, raised = getattr(Path, step), []

    def interrupted(self, *args, **options):
        if "4.part" in self.parts and not raised:
            raised.append(self)
            raise KeyboardInterrupt
        return real(self, *args, **options)

    monkeypatch.setattr(Path, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run")
    monkeypatch.undo()
    assert raised
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(names) == ["2", "4"]
    assert checkpointing.read_last_checkpoint(tmp_path / "run").round == 4
    fit(tmp_path / "run")
    assert_same_run(runs["fedpa"][0] / "whole", tmp_path / "run")


def test_a_run_of_the_old_format_is_refused(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    for path in (out / "checkpoints").iterdir():
        shutil.rmtree(path)
        (path / "arrays").mkdir(parents=True)
        (path / "_CHECKPOINT_METADATA").write_text("{}")
    before = tree(out)
    with pytest.raises(FedpaError, match=r"checkpoint '.*4' has format 1.*reads 2") as refused:
        fit(out)
    assert "\n" not in str(refused.value)
    del before[".lock"]
    assert {name: file for name, file in tree(out).items() if name != ".lock"} == before


def test_an_interrupted_run_saves_the_last_whole_round(runs, tmp_path):
    def interrupt(event):
        if event.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", callbacks=[interrupt])
    assert checkpointing.list_checkpoints(tmp_path / "run") == [2, 3]
    fit(tmp_path / "run")
    assert left(tmp_path / "run")[0] == left(runs["fedpa"][0] / "whole")[0]


def test_a_clock_that_jumps_does_no_harm(runs, tmp_path, monkeypatch):
    """Years ahead and back between rounds."""
    real_time, offset = time.time, [0.0]

    def jump(event):
        offset[0] = 1e9 * (-1) ** event.round

    monkeypatch.setattr(time, "time", lambda: real_time() + offset[0])
    fit(tmp_path / "run", callbacks=[jump])
    monkeypatch.undo()
    assert all(record["seconds"] > 0 for record in fedpa.load(tmp_path / "run").metrics)
    assert_same_run(runs["fedpa"][0] / "whole", tmp_path / "run")


def test_stopping_to_be_resumed(runs, tmp_path):
    pause = lambda event: fedpa.Stop("later", finished=False) if event.round == 3 else None  # noqa: E731
    first = fit(tmp_path / "run", callbacks=[pause])
    assert (first.stopped, first.finished, len(first.history)) == ("later", False, 3)
    assert not (tmp_path / "run" / "summary.json").exists()
    unfinished = fedpa.load(tmp_path / "run")
    assert unfinished.round == 3
    fit(tmp_path / "run")
    assert left(tmp_path / "run")[0] == left(runs["fedpa"][0] / "whole")[0]


def resume(out, method="fedpa", **options):
    """As `fit`, with the settings from the directory."""
    settings = {"evaluate": evaluate, "engine": ENGINE, "progress": False} | options
    model = METHODS[method] if isinstance(method, str) else method
    return fedpa.resume(out, least_squares.loss, jnp.zeros(3), CLIENTS, model, **settings)


@pytest.mark.parametrize("method", METHODS)
def test_resume_takes_the_settings_from_the_directory(runs, tmp_path, method):
    """Killed after round 4: 2 clients a round, evaluations, best metric and checkpoints as set."""
    out = copy_of(runs, tmp_path, "in-round-6", method)
    done = []
    resumed = resume(out, method, callbacks=[lambda event: done.append(event.round)])
    assert done == [5, 6]
    assert_same_run(runs[method][0] / "whole", out)
    whole = runs[method][1]
    assert trees_equal((resumed.params, resumed.state), (whole.params, whole.state))
    assert resumed.best == whole.best
    config = [run_directory.read_config(path)[0] for path in (runs[method][0] / "whole", out)]
    assert config[0] == config[1]
    before = tree(out)
    assert resume(out, method, evaluate=None).history == resumed.history  # finished
    assert tree(out) == before


def test_resume_after_a_pause_extends_and_keeps_what_a_person_chose(tmp_path):
    """All of RecordingOptions, seed and min_success; then as a run that was never paused."""
    recording = RecordingOptions(checkpoint_every=3, keep_checkpoints=1, label="mine")
    options = {"recording": recording, "seed": 7, "min_success": 0.5, "eval_every": 2}
    pause = lambda event: fedpa.Stop("later", finished=False) if event.round == 3 else None  # noqa: E731
    paused = fit(tmp_path / "run", callbacks=[pause], **options)
    assert (paused.finished, paused.label, paused.out) == (False, "mine", tmp_path / "run")
    resumed = resume(tmp_path / "run", rounds=8)
    assert (resumed.label, len(resumed.history)) == ("mine", 8)
    fit(tmp_path / "whole", rounds=8, **options)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    config = [run_directory.read_config(tmp_path / name)[0] for name in ("whole", "run")]
    assert config[0] == config[1]


def test_resume_chooses_the_engine_by_its_name(tmp_path):
    pause = lambda event: fedpa.Stop("later", finished=False)  # noqa: E731
    own = (least_squares.loss, jnp.zeros(3), CLIENTS, METHODS["fedpa"])
    settings = {"rounds": 4, "clients_per_round": 2, "progress": False, "out": tmp_path / "run"}
    fedpa.fit(*own, engine=fedpa.engines.per_client(), callbacks=[pause], **settings)
    assert len(fedpa.resume(tmp_path / "run", *own, progress=False).history) == 4
    settings |= {"out": tmp_path / "other"}
    fedpa.fit(*own, engine=lambda *args: ENGINE(*args), callbacks=[pause], **settings)
    with pytest.raises(FedpaError, match=r"engine = '.*': "):
        fedpa.resume(tmp_path / "other", *own, progress=False)


def test_resume_says_what_it_needs(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    before = tree(out)
    with pytest.raises(FedpaError, match=r"needs loss, params, clients, method$"):
        fedpa.resume(out)
    with pytest.raises(FedpaError, match=r"needs clients, method$"):
        fedpa.resume(out, least_squares.loss, jnp.zeros(3))
    with pytest.raises(FedpaError, match="evaluate is missing"):
        resume(out, evaluate=None)
    with (
        pytest.raises(FedpaError, match=r"rounds = 3: .*has 4"),
        warnings_of_burn_in(),
    ):
        resume(out, rounds=3)
    with pytest.raises(FedpaError, match="changed"):
        resume(out, posterior_averaging(rate=0.2))
    del before[".lock"]
    assert {name: file for name, file in tree(out).items() if name != ".lock"} == before


def warnings_of_burn_in():
    return pytest.warns(UserWarning, match="all 3 rounds are burn-in")


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("seed = 0", "seed = 'x'", "seed = 'x'"),
        ("seed = 0\n", "", "seed is missing"),
        ("eval_every = 4", "eval_every = 0", "eval_every = 0"),
        ("checkpoint_every = 2", "often = 2", "recording = "),
        ("keep_checkpoints = 3", "keep_checkpoints = 'x'", "recording.keep_checkpoints = 'x'"),
        ("metric = ", "name = ", "best = "),
    ],
)
def test_resume_names_what_is_wrong_in_the_configuration(runs, tmp_path, old, new, field):
    out = copy_of(runs, tmp_path, "in-round-6")
    text = (out / "config.toml").read_text()
    assert old in text
    (out / "config.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(FedpaError) as refused:
        resume(out)
    assert field in str(refused.value)
    assert "\n" not in str(refused.value)


def test_checkpoints_are_read_as_trees(runs, tmp_path):
    out, whole = runs["scaffold"][0] / "whole", runs["scaffold"][1]
    last = fedpa.load_checkpoint(out)
    assert (last.round, [record["round"] for record in last.history]) == (6, [1, 2, 3, 4, 5, 6])
    assert trees_equal(last.state["theta"], whole.state.theta)
    algorithm = ALGORITHMS["scaffold"]
    for like in (algorithm.init(jnp.ones(3)), jax.eval_shape(algorithm.init, jnp.ones(3))):
        filled = fedpa.load_checkpoint(out, like=like)
        assert jax.tree.structure(filled.state) == jax.tree.structure(whole.state)
        assert trees_equal(filled.state, whole.state)
    names = jax.tree_util.tree_leaves_with_path(last.state)
    assert len(names) == len(jax.tree.leaves(whole.state))
    best = fedpa.load_checkpoint(out, "best")
    assert best.round == whole.best["round"]
    middle = fedpa.load_checkpoint(out, 4)
    assert (middle.round, len(middle.history)) == (4, 4)
    with pytest.raises(FedpaError, match="no checkpoint of round 3: available: 2, 4, 6"):
        fedpa.load_checkpoint(out, 3)
    with pytest.raises(FedpaError, match=r"state/w "):
        fedpa.load_checkpoint(out, like={"w": jnp.zeros(3)})
    with pytest.raises(FedpaError, match=r"has shape \[3\]: \[4\] is needed"):
        fedpa.load_checkpoint(out, like=algorithm.init(jnp.ones(4)))


def test_names_that_look_like_places_need_a_state_to_fill(tmp_path):
    state = {"a": jnp.ones(1), "a/b": jnp.zeros(2), "c": {"d": jnp.ones(3)}}
    snapshot = Snapshot(0, state, jnp.ones(1), {}, fedpa.training.History(), {})
    run_directory.write_config(tmp_path, {"rounds": 1}, {"source": "x"})
    checkpointing.save_checkpoint(tmp_path, snapshot, {})
    with pytest.raises(FedpaError, match=r"state/a/b: .*like="):
        fedpa.load_checkpoint(tmp_path)
    assert trees_equal(fedpa.load_checkpoint(tmp_path, like=state).state, state)


def describe_fit(method, loss=least_squares.loss):
    """What is recorded of method and loss, by which another is told on resuming."""
    data = fedpa.data.from_mapping(CLIENTS)
    prepared = prepare(fedpa.Objective(loss), jnp.zeros(3), data, method, ROUNDS)
    known = method.settings() if isinstance(method, Described) else {}
    return known, provenance.describe_program(method, prepared)


def other_methods():
    """Each differs from `posterior_averaging()` in one thing."""
    for rate, rho, burn_in in ((0.2, 0.1, 3), (0.1, 0.2, 3), (0.1, 0.1, 4)):
        side = Server(server.adam(rate), averaging=server.averaging.polyak())
        yield fedpa.fedpa(LOCAL, side, rho=rho, burn_in_rounds=burn_in)
    side = Server(server.adam(0.1), averaging=server.averaging.polyak())
    with_momentum = LOCAL._replace(optimizer=optax.sgd(0.05, momentum=0.9))
    yield fedpa.fedpa(with_momentum, side, rho=0.1, burn_in_rounds=3)
    yield fedpa.fedpa(LOCAL, side._replace(averaging=server.averaging.none()), rho=0.1,
                      burn_in_rounds=3)  # fmt: skip
    decaying = side._replace(schedule=server.schedules.exponential(0.99))
    yield fedpa.fedpa(LOCAL, decaying, rho=0.1, burn_in_rounds=3)


@pytest.mark.parametrize(
    "own", [False, pytest.param(True, marks=pytest.mark.long)], ids=["fedpa's", "own"]
)
def test_a_method_of_other_settings_is_known(own):
    def give(method):
        return (lambda objective: method(objective)) if own else method

    one = describe_fit(give(posterior_averaging()))
    assert describe_fit(give(posterior_averaging())) == one
    assert all(describe_fit(give(other)) != one for other in other_methods())


def test_a_piece_of_other_settings_is_known():
    """Pieces are functions: by name alone, deltas of one builder would all be the same."""

    def describe(**piece):
        return describe_fit(fedpa.fedpa(LOCAL, Server(server.sgd(0.1)), burn_in_rounds=3, **piece))

    def delta(rho):
        return fedpa.deltas.posterior(5, fedpa.deltas.fixed(rho))

    def sampler(rate):
        return lambda objective, multiplier: fedpa.samplers.iasg(objective, rate, batch_size=4)

    for name, make, more in (("delta", delta, {}), ("sampler", sampler, {"rho": 0.1})):
        one = describe(**{name: make(0.1)}, **more)
        assert describe(**{name: make(0.1)}, **more) == one
        assert describe(**{name: make(0.2)}, **more) != one


def test_constants_inside_a_compiled_loss_are_part_of_the_program():
    def fingerprint(weights):
        inner = jax.jit(lambda r: weights[0] * r**2)

        def loss(theta, batch, key):
            return inner(batch["x"] @ theta - batch["y"])

        return describe_fit(posterior_averaging(), loss)

    assert fingerprint(jnp.array([1.0, 2.0])) == fingerprint(jnp.array([1.0, 2.0]))
    assert fingerprint(jnp.array([1.0, 2.0])) != fingerprint(jnp.array([5.0, 2.0]))


def test_a_checkpoint_that_can_not_be_read_now_is_not_thrown_away(runs, tmp_path, monkeypatch):
    """A disk that does not answer says nothing about the checkpoint."""
    out = copy_of(runs, tmp_path, "in-round-6")
    before = tree(out)

    def away(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpointing, "load_file", away)
    with pytest.raises(FedpaError, match="4' can't be read: Input/output error"):
        fit(out)
    monkeypatch.undo()
    del before[".lock"]
    assert {name: file for name, file in tree(out).items() if name != ".lock"} == before
    fit(out)
    assert_same_run(runs["fedpa"][0] / "whole", out)


def test_a_refused_resume_changes_nothing(runs, tmp_path):
    out = copy_of(runs, tmp_path, "in-round-6")
    before = tree(out)
    with (
        pytest.warns(UserWarning, match="all 3 rounds are burn-in"),
        pytest.raises(FedpaError, match=r"rounds = 3: .*has 4"),
    ):
        fit(out, force=True, rounds=3)
    del before[".lock"]
    assert {name: file for name, file in tree(out).items() if name != ".lock"} == before


@pytest.mark.parametrize(("name", "field"), [("metrics.jsonl", "mse"), ("summary.json", "value")])
def test_a_finished_run_with_a_changed_digit_is_written_again(runs, tmp_path, name, field):
    out = copy_of(runs, tmp_path, "whole")
    text = (out / name).read_text()
    digit = re.search(rf'{field}": \d\.(\d)', text).start(1)
    (out / name).write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    fit(out)
    assert_same_run(runs["fedpa"][0] / "whole", out)


@pytest.mark.parametrize("lost", ["params.npz", "metrics.jsonl", "torn"])
def test_a_finished_run_that_lost_a_file_gets_it_back(runs, tmp_path, lost):
    out = copy_of(runs, tmp_path, "whole")
    if lost == "torn":
        _halve(out / "metrics.jsonl")
    else:
        (out / lost).unlink()
    fit(out)
    assert_same_run(runs["fedpa"][0] / "whole", out)


def test_a_finished_run_without_checkpoints(runs, tmp_path):
    """It is given back; but nothing can go on from it, and it is nobody else's."""
    out = copy_of(runs, tmp_path, "whole")
    shutil.rmtree(out / "checkpoints")
    assert fit(out).history == runs["fedpa"][1].history
    with pytest.raises(FedpaError, match="seed was 0 and is 5"):
        fit(out, seed=5)
    with pytest.raises(FedpaError, match="has no checkpoints"):
        fit(out, rounds=9)
    assert (out / "params.npz").exists()


def test_overwriting_takes_nothing_that_is_not_ours(tmp_path):
    for name in (".tool/config.toml", "other/config.toml", "other/checkpoints/1/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a = 1")
    run_directory.clear(tmp_path)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
    with pytest.raises(FedpaError, match="contains checkpoints/, which fedpa did not write"):
        run_directory.check_free(tmp_path / "other", overwrite=True)


def test_an_end_is_an_end_whoever_else_wants_a_pause(tmp_path):
    pause = lambda event: fedpa.Stop("later", finished=False)  # noqa: E731
    end = lambda event: fedpa.Stop("enough")  # noqa: E731
    both = fit(tmp_path / "both", callbacks=[pause, end])
    assert (both.stopped, both.finished) == ("enough", True)
    last = lambda event: pause(event) if event.round == ROUNDS else None  # noqa: E731
    assert fit(tmp_path / "last", callbacks=[last]).finished


def test_what_is_remembered_is_the_same_after_a_resume(tmp_path):
    """JSON makes lists of tuples and texts of keys: at once, not only in a checkpoint."""
    seen = []

    def update(memory, event):
        seen.append(memory)
        return {1: (event.round, "x")}, {"mine": memory.get("1", [0])[0]}

    fit(tmp_path / "run", callbacks=[fedpa.Remembering("mine", {}, update)])
    assert seen[1] == {"1": [1, "x"]}
    unkept = fedpa.Remembering("mine", {1, 2}, update)
    with pytest.raises(FedpaError, match=r"callback 'mine': .*JSON"):
        fit(None, callbacks=[unkept])


def test_models_of_any_arrays_come_back(tmp_path):
    """Low precision, random keys, nothing at all, names that NumPy has plans for."""
    params = {
        "file": jnp.ones(3, jnp.bfloat16),
        "key": jax.random.key(3),
        "none": jnp.zeros((0, 2), jnp.bfloat16),
        "n": np.arange(3),
    }
    data = {"a": {"x": np.ones((8, 3), np.float32)}, "b": {"x": -np.ones((8, 3), np.float32)}}
    local = LocalTraining(optax.sgd(0.1), batch_size=4)
    method = fedpa.fedavg(local, Server(server.sgd(1.0)))

    def loss(params, batch, key):
        return batch["x"].astype(jnp.bfloat16) @ params["file"]

    def again(out):
        options = {"rounds": 2, "clients_per_round": 2, "engine": ENGINE, "out": out}
        options |= {"progress": False}
        return fedpa.fit(loss, params, data, method, **options)

    first, second = again(tmp_path / "run"), again(tmp_path / "run")
    assert second.params["file"].dtype == jnp.bfloat16
    loaded = fedpa.load(tmp_path / "run", params=params).params
    for found in (second.params, loaded):
        assert trees_equal(found["file"], first.params["file"])
        assert jax.random.key_data(found["key"]).tolist() == [0, 3]
        assert found["none"].shape == (0, 2)
    for ending in ("npz", "safetensors"):
        fedpa.export(tmp_path / "run", tmp_path / f"model.{ending}")
    assert np.load(tmp_path / "model.npz")["file"].dtype == np.float32


def test_checkpoints_hold_arrays_of_any_type_and_shape(tmp_path):
    """Each comes back with its type and bits; equal ones are stored once."""
    types = ["bfloat16", "float8_e4m3fn", "float16", "float32", "int4", "int8", "uint16", "bool"]
    state = {name: jnp.arange(6).reshape(2, 3).astype(name) for name in types}
    state |= {f"{name} 0-d": jnp.ones((), name) for name in types}
    state |= {"empty": jnp.zeros((0, 2)), "keys": jax.random.split(jax.random.key(3))}
    state |= {"a/b": {"é 'x'": np.full((3, 2), np.nan, np.float32).T}, "none": None}
    client = {"c": jnp.arange(3.0), "n": jnp.asarray(2)}
    params = {"theta": state["float32"]}
    states = {"one": client, "two": jax.tree.map(jnp.zeros_like, client)}
    snapshot = Snapshot(0, state, params, states, fedpa.training.History(), {})
    checkpointing.save_checkpoint(tmp_path, snapshot, {})
    stored = checkpointing.read_checkpoint(tmp_path, 0)

    def clear(leaf):
        return leaf[::-1] if named_arrays.is_key(leaf) else jnp.zeros_like(leaf)

    templates = jax.tree.map(clear, (state, params, client))
    found = checkpointing.restore_snapshot(stored, *templates)
    for whole, back in (
        (state, found.state),
        (params, found.params),
        (states, found.client_states),
    ):
        assert jax.tree.structure(whole) == jax.tree.structure(back)
        for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(back), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            a, b = named_arrays.to_numpy(one), named_arrays.to_numpy(other)
            assert a.tobytes() == b.tobytes()
    names = set(load_file(tmp_path / "checkpoints" / "0" / "state.safetensors"))
    assert {"params/theta", "state/keys", "clients/c"} <= names
    assert "state/float32" not in names  # θ, which is there already


def test_arrays_that_files_could_not_tell_apart_are_refused(tmp_path):
    with pytest.raises(FedpaError, match="two arrays have the name a/b in files"):
        named_arrays.name_arrays({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_a_history_is_a_table(runs):
    frame = runs["fedpa"][1].history.to_pandas()
    assert list(frame.index) == [1, 2, 3, 4, 5, 6]
    assert frame["eval/mse"].notna().tolist() == [False, False, False, True, False, True]
    assert hashlib.sha256(frame.to_csv().encode()).hexdigest()  # and pandas can write it


def test_metrics_must_be_numbers(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = {"mine": np.float32(2), "t": "text"}
        got = fit(None, rounds=4, callbacks=[lambda event: mine])
    assert (got.history[0]["mine"], type(got.history[0]["mine"])) == (2.0, float)
    with pytest.raises(FedpaError, match=r"mine = array\(\[1, 2\]\): is an array"):
        fit(None, rounds=4, callbacks=[lambda event: {"mine": np.array([1, 2])}])
