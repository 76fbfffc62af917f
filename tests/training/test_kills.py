"""A real process, killed with SIGKILL at any moment, as often as one likes."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.federations import trees_equal

RUN = ["digits", "--rounds", "24", "--clients-per-round", "3", "--epochs", "2", "--quiet"]
RUN += ["--burn-in-rounds", "10", "--server-optimizer", "adam", "--server-learning-rate", "0.01"]
RUN += ["--iterate-averaging", "polyak", "--checkpoint-every", "1", "--eval-every", "3"]


def command(*words):
    return [sys.executable, "-m", "fedpa", *map(str, words)]


def left(out):
    """What a run leaves, but for its times: records, summary, parameters."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    summary = json.loads((out / "summary.json").read_text())
    for table in (*records, summary):
        del table["seconds"]
    return records, summary, dict(np.load(out / "params.npz"))


def start_command(out):
    return command("run", *RUN, "--out", out)


def resume_command(out):
    return command("resume", out, "--quiet")


OWN = """
import sys
import jax.numpy as jnp, fedpa
from fedpa.objectives import least_squares
from tests.federations import least_squares_clients

how, out = sys.argv[1:]
side = fedpa.Server(fedpa.server.adam(0.1), averaging=fedpa.server.averaging.polyak())
method = fedpa.fedpa(fedpa.LocalTraining(0.05, 8, epochs=2), side, rho=0.1, burn_in_rounds=10)
own = (least_squares.loss, jnp.zeros(3), least_squares_clients(sizes=(20, 8, 12)), method)
more = {"evaluate": lambda params: {"sum": float(params.sum())}, "progress": False}
if how == "resume":
    fedpa.resume(out, *own, **more)
else:
    recording = fedpa.RecordingOptions(checkpoint_every=1, best="eval/sum")
    fedpa.fit(*own, rounds=300, clients_per_round=2, seed=3, eval_every=3, out=out,
              recording=recording, **more)
"""


def start_fit(out):
    return [sys.executable, "-c", OWN, "fit", str(out)]


def resume_fit(out):
    return [sys.executable, "-c", OWN, "resume", str(out)]


def assert_survives(tmp_path, kills, seed, start=start_command, resume=resume_command):
    """Kill it at random moments, half of them while it trains and writes; let it end; compare."""
    chance = random.Random(seed)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    started = time.monotonic()
    subprocess.run(start(whole), check=True, stdout=subprocess.DEVNULL)
    duration = time.monotonic() - started
    done = 0
    while done < kills:
        words = resume(out) if (out / "config.toml").exists() else start(out)
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if chance.random() < 0.5:  # at any moment
            _wait(process, chance.uniform(0.0, duration))
        else:  # in a round, or while a checkpoint is written
            _wait_for_work(process, out)
            _wait(process, chance.uniform(0.0, 0.3))
        process.kill()
        _, said = process.communicate()
        assert process.returncode in (0, -9), said.decode()
        done += 1
        if process.returncode == 0 and (out / "summary.json").exists():
            break
    words = resume(out) if (out / "config.toml").exists() else start(out)
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    assert_same(whole, out)
    return done


def assert_same(one, other):
    for a, b in zip(left(one)[:2], left(other)[:2], strict=True):
        assert a == b
    assert trees_equal(left(one)[2], left(other)[2])


def _wait(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _wait_for_work(process, out):
    """Until a checkpoint is written that was not there before."""
    before = _entries(out)
    while process.poll() is None and _entries(out) == before:
        time.sleep(0.005)


def _entries(out):
    return set(os.listdir(out / "checkpoints")) if (out / "checkpoints").exists() else set()


def test_a_kill(tmp_path):
    assert assert_survives(tmp_path, kills=1, seed=0) == 1


@pytest.mark.long
def test_kills_of_a_run_by_fit(tmp_path):
    """Resumed by `fedpa.resume` with functions, model and data given again."""
    assert assert_survives(tmp_path, 2, seed=0, start=start_fit, resume=resume_fit) == 2


@pytest.mark.long
def test_a_hundred_kills(tmp_path):
    """Runs end now and then in spite of them; then another begins."""
    done, seed = 0, 1
    while done < 100:
        (tmp_path / str(seed)).mkdir()
        done += assert_survives(tmp_path / str(seed), kills=100 - done, seed=seed)
        seed += 1


FULL = """
mount -t tmpfs -o size=700k tmpfs "$1" || exit 77
shift
"$@"; echo "first $?"
mount -o remount,size=16m tmpfs "$(dirname "$OUT")"
"$PYTHON" -m fedpa resume "$OUT" --quiet; echo "second $?"
cp -r "$OUT" "$COPY"
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare makes a small disk: not here")
def test_a_real_disk_that_is_full(tmp_path):
    """An error says what to do; with room again the run ends as if undisturbed."""
    small, out, copy = tmp_path / "small", tmp_path / "small" / "run", tmp_path / "copy"
    small.mkdir()
    longer = [*RUN, "--rounds", "40", "--keep-checkpoints", "40"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", FULL, "sh", small, *command("run", *longer, "--out", out)],
        env=os.environ | {"OUT": str(out), "COPY": str(copy), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77:
        pytest.skip("a small disk can't be mounted here")
    assert "first 2" in done.stdout, done.stderr
    assert re.search(
        r"error: .*(can't be written|No space left).*; once that is resolved, `fedpa resume",
        done.stderr,
    )
    assert "second 0" in done.stdout, done.stderr
    whole = tmp_path / "whole"
    subprocess.run(command("run", *longer, "--out", whole), check=True, stdout=subprocess.DEVNULL)
    assert_same(whole, copy)
