"""Any sequence of runs, kills, resumes, extensions, damage and full disks.

A run that reports success is the uninterrupted run, bit for bit; one that fails names a file.
"""

import errno
import functools
import json
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import fedpa
from fedpa import FedpaError, LocalTraining, RecordingOptions, Server, server
from fedpa.objectives import least_squares
from tests.federations import least_squares_clients, trees_equal
from tests.fuzz.mutations import change_bytes

CLIENTS = least_squares_clients(sizes=(8, 8, 8))
LENGTHS = (3, 5, 7)
# One engine and one algorithm for all: what one run compiles serves the next.
ENGINE = fedpa.engines.local()
LOCAL = LocalTraining(optax.sgd(0.05), batch_size=4, epochs=2)
ALGORITHM = fedpa.fedpa(LOCAL, Server(server.adam(0.1)), rho=0.1, burn_in_rounds=2)(
    fedpa.Objective(least_squares.loss)
)
RECORDING = RecordingOptions(checkpoint_every=1, keep_checkpoints=3, best="eval/sum")
KEPT = ("config.toml", "metrics.jsonl", "params.npz", "summary.json")


class Killed(BaseException):
    """The process ends here, as by SIGKILL: nothing after it is done."""


def train(out, rounds, callbacks=()):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="checkpoint .* is skipped")
        return fedpa.fit(
            least_squares.loss,
            jnp.zeros(3),
            CLIENTS,
            lambda objective: ALGORITHM,
            rounds=rounds,
            clients_per_round=2,
            seed=1,
            evaluate=lambda params: {"sum": float(params.sum())},
            engine=ENGINE,
            out=out,
            recording=RECORDING,
            callbacks=callbacks,
            progress=False,
        )


def kill_after(t):
    def kill(event):
        if event.round == t:
            raise Killed

    return kill


@functools.cache
def run_uninterrupted(rounds):
    with tempfile.TemporaryDirectory() as out:
        fit = train(Path(out) / "run", rounds)
        return fit, read_files(Path(out) / "run")


def without_seconds(record):
    return {name: value for name, value in record.items() if name != "seconds"}


def read_files(out):
    """What the files of a finished run have, but for times."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    arrays = (out / "params.npz").read_bytes()
    return [*map(without_seconds, metrics)], without_seconds(summary), arrays


class Disk:
    """A disk that is full after so many bytes, in this process."""

    def __init__(self, room):
        self.room, self.write = room, os.fsync

    def __enter__(self):
        def sync(number):
            self.room -= os.fstat(number).st_size
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.write(number)

        os.fsync = sync

    def __exit__(self, *error):
        os.fsync = self.write


class Histories(RuleBasedStateMachine):
    counts = {"runs": 0, "succeeded": 0, "failed": 0, "killed": 0}

    def __init__(self):
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="fedpa-histories-"))
        (self.home / "outside").write_text("outside")
        self.out, self.longest = self.home / "run", 0

    def teardown(self):
        shutil.rmtree(self.home)

    def attempt(self, rounds, callbacks=()):
        """Train; what succeeds is compared, what fails names a file or the run."""
        self.counts["runs"] += 1
        try:
            fit = train(self.out, rounds, callbacks)
        except Killed:
            self.counts["killed"] += 1
            return
        except FedpaError as refused:
            self.counts["failed"] += 1
            if str(self.out) not in str(refused):
                raise AssertionError("names no file") from refused
            return
        self.counts["succeeded"] += 1
        whole, files = run_uninterrupted(rounds)
        assert trees_equal(fit.params, whole.params)
        assert trees_equal(fit.state, whole.state)
        assert [*map(without_seconds, fit.history)] == [*map(without_seconds, whole.history)]
        assert read_files(self.out) == files

    @rule(rounds=strategies.sampled_from(LENGTHS))
    def run_or_resume(self, rounds):
        self.attempt(rounds)

    @rule(rounds=strategies.sampled_from(LENGTHS), t=strategies.integers(1, 7))
    def kill(self, rounds, t):
        self.attempt(rounds, [kill_after(t)])

    @rule(rounds=strategies.sampled_from(LENGTHS), room=strategies.integers(0, 30_000))
    def fill_disk(self, rounds, room):
        with Disk(room):
            self.attempt(rounds)

    @rule(name=strategies.sampled_from(KEPT), seed=strategies.integers(0, 99))
    def damage_file(self, name, seed):
        path = self.out / name
        if path.is_file() and path.stat().st_size:
            path.write_bytes(change_bytes(path.read_bytes(), random.Random(seed)))

    @rule(name=strategies.sampled_from(KEPT))
    def remove_file(self, name):
        (self.out / name).unlink(missing_ok=True)

    @rule(seed=strategies.integers(0, 99))
    def damage_checkpoint(self, seed):
        paths = sorted(path for path in self.out.glob("checkpoints/*/*") if path.stat().st_size)
        if paths:
            draw = random.Random(seed)
            path = draw.choice(paths)
            path.write_bytes(change_bytes(path.read_bytes(), draw))

    @rule()
    def start_again(self):
        shutil.rmtree(self.out, ignore_errors=True)

    @invariant()
    def nothing_is_written_outside(self):
        assert {path.name for path in self.home.iterdir()} <= {"run", "outside"}
        assert (self.home / "outside").read_text() == "outside"


@pytest.mark.long
def test_any_history_of_a_run_ends_as_the_uninterrupted_run_or_names_a_file():
    shown = settings.default
    chosen = settings(shown, max_examples=min(shown.max_examples, 200), stateful_step_count=12)
    run_state_machine_as_test(Histories, settings=chosen)
    print("\n" + ", ".join(f"{count:,} {name}" for name, count in Histories.counts.items()))
