"""When checkpoints are written, and which are kept: the last ones, and the best on validation.

Nothing a run computes depends on when that happens.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.errors import FedpaError
from fedpa.training import checkpoints
from fedpa.training.recording_options import RecordingOptions
from fedpa.training.signals import uninterrupted
from fedpa.training.snapshot import Keep, Snapshot
from fedpa.training.stopping import BEST

AT_LEAST = 10.0
"""Seconds between checkpoints where nobody says how often: what a kill costs, and a round."""
SHARE = 0.05
"""Of a run's time that writing them may take then."""


class Saver(NamedTuple):
    keep: Keep
    """Take note of a round, and write it if a checkpoint is due."""
    write: Callable[[], None]
    """Write the last round now, unless it is written."""


@contextlib.contextmanager
def saved(
    out: Path,
    settings: Mapping[str, Any],
    options: RecordingOptions,
    done: int,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Saver]:
    """Write checkpoints of the snapshots given; when the block ends, however, of the last one.

    done: the round that has a checkpoint already, 0 if there is none. A round that is the best so
    far waits in memory until the next checkpoint is due, and is then written before it.
    """
    latest: Snapshot | None = None
    best: Snapshot | None = None
    broken = False
    due_at = clock() + AT_LEAST

    def write() -> None:
        nonlocal done, best, due_at, broken
        if latest is None or latest.round <= done:
            return
        started = clock()
        waiting = best if best is not None and best.round < latest.round else None
        try:
            for snapshot in (waiting, latest):
                if snapshot is not None:
                    with uninterrupted():
                        checkpoints.save(out, snapshot, settings)
                        done = snapshot.round
        except FedpaError:
            broken = True
            raise
        best = None
        chosen = best_round(latest.stored.memory)
        checkpoints.prune(out, options.keep_checkpoints, [chosen] if chosen else [])
        ended = clock()
        due_at = ended + max(AT_LEAST, (ended - started) / SHARE)

    def keep(snapshot: Snapshot) -> None:
        nonlocal latest, best
        latest = snapshot
        if best_round(snapshot.stored.memory) == snapshot.round:
            best = snapshot
        every = options.checkpoint_every
        if snapshot.round % every == 0 if every is not None else clock() >= due_at:
            write()

    try:
        yield Saver(keep, write)
    except BaseException as passing:
        if not broken:
            try:
                write()
            except FedpaError as error:  # beside what ended the run, not in its place
                passing.add_note(str(error))
                warnings.warn(str(error), stacklevel=2)
        raise
    write()


def best_of(memory: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The best round so far, as `stopping.remember_best` has it; None if there is none yet."""
    best = memory.get(BEST)
    return best if best is not None and best["round"] is not None else None


def best_round(memory: Mapping[str, Any]) -> int | None:
    """The number of the best round so far."""
    best = best_of(memory)
    return None if best is None else best["round"]
