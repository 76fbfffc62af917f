"""A long run: memory, open files and threads stay as they are, except for the records it keeps."""

import os
import threading
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import fedpa
from fedpa import LocalTraining, RecordingOptions, Server, server
from fedpa.objectives import least_squares
from tests.federations import least_squares_clients

RECORD = 4096
"""Bytes of memory that a round's record may take: it is in the history."""
SLACK = 2**24
"""Bytes that the allocator may keep."""


def measure():
    """(resident bytes, open files, threads) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGESIZE"),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def run_long(out, rounds):
    """Measurements after a tenth of the rounds, and every tenth of them."""
    seen = []

    def watch(event):
        if event.round % (rounds // 10) == 0:
            seen.append(measure())

    method = fedpa.fedpa(
        LocalTraining(optax.sgd(0.05), batch_size=4, epochs=2), Server(server.adam(0.1)), rho=0.1
    )
    fit = fedpa.fit(
        least_squares.loss,
        jnp.zeros(3),
        least_squares_clients(sizes=(8, 8, 8)),
        method,
        rounds=rounds,
        clients_per_round=2,
        evaluate=lambda params: {"sum": float(params.sum())},
        eval_every=100,
        callbacks=[watch],
        out=out,
        recording=RecordingOptions(checkpoint_every=rounds // 5),
        progress=False,
    )
    assert len(fit.history) == rounds
    return seen


def check_flat(seen, rounds):
    (memory, files, threads), *later = seen
    for tenths, (now, open_files, running) in enumerate(later, start=1):
        assert open_files <= files + 1  # a checkpoint, while it is written
        assert running <= threads
        assert now - memory <= SLACK + RECORD * rounds * tenths // 10
    print(f"\n{rounds:,} rounds: {(later[-1][0] - memory) / 2**20:+.1f} MB, {threads} threads")


def test_a_run_keeps_its_files_and_threads(tmp_path):
    check_flat(run_long(tmp_path / "run", 200), 200)


@pytest.mark.long
def test_ten_thousand_rounds_take_no_more_memory(tmp_path):
    check_flat(run_long(tmp_path / "run", 10_000), 10_000)
