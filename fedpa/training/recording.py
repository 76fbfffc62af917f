"""Recording a run as it goes: when checkpoints are written, which are kept, where records go.

Why a kill loses and doubles nothing: a round's record goes to `metrics.jsonl` before its checkpoint
is written, and a checkpoint holds all records up to its round. Resuming takes the last checkpoint
and writes `metrics.jsonl` again from it, so whatever came after it, complete or torn, is gone, and
is computed again with the same result. Nothing a run computes depends on when checkpoints are
written.
"""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.errors import FedpaError, check_integer, match_name
from fedpa.training import run_directory
from fedpa.training.checkpoint import prune_checkpoints, save_checkpoint
from fedpa.training.history import History, Record, line
from fedpa.training.loggers.logger import check_loggers, loggers
from fedpa.training.loop import Keep, Snapshot
from fedpa.training.run_directory import METRICS, Made, writing
from fedpa.training.stopping import best_of, best_round

AT_LEAST = 10.0
"""Seconds between checkpoints by default: what a kill costs, and a round."""
SHARE = 0.05
"""Of a run's time that writing them may take then."""
_SPLITS = ("eval", "valid", "test")


@dataclasses.dataclass(frozen=True)
class RecordingOptions:
    """How a run is recorded. None of it changes its numbers."""

    checkpoint_every: int | None = None
    """Rounds from one checkpoint to the next; if not given, a checkpoint is written every ten
    seconds or so, less often where writing one takes long."""
    keep_checkpoints: int = 3
    """How many of the last checkpoints are kept, beside the best."""
    log: str | None = None
    """Where records go beside metrics.jsonl and TensorBoard: wandb, mlflow, or both with a comma
    between them."""


def check_recording(options: RecordingOptions) -> None:
    """Refuse what is out of range, and loggers that are not there."""
    if options.checkpoint_every is not None:
        check_integer("checkpoint_every", options.checkpoint_every, 1)
    check_integer("keep_checkpoints", options.keep_checkpoints, 1)
    check_loggers(_logger_names(options))


def _logger_names(options: RecordingOptions) -> list[str]:
    """TensorBoard where tensorboardX is installed, then those asked for."""
    words = [word.strip() for word in (options.log or "").split(",") if word.strip()]
    asked = [match_name(word, loggers()) or word for word in words]
    if "tensorboard" not in asked and find_spec("tensorboardX") is not None:
        asked = ["tensorboard", *asked]
    return asked


class Recorder(NamedTuple):
    keep: Keep
    """Record a round, and write its checkpoint if one is due."""
    write: Callable[[], None]
    """Make sure that the last round has its checkpoint."""
    log: Callable[[Mapping[str, Any]], None]
    """Send loggers what the end adds to the last record."""


@contextlib.contextmanager
def record_run(
    out: Path, made: Made, options: RecordingOptions, start: Snapshot | None
) -> Iterator[Recorder]:
    """Record a run; `start` is where it continues from."""
    past = start.history if start is not None else History()
    done = start.round if start is not None else 0
    run_directory.write_metrics(out, past)
    with contextlib.ExitStack() as stack:
        keep_checkpoint, write = stack.enter_context(
            _write_checkpoints(out, made.settings, options, done)
        )
        table = {**made.settings, run_directory.ENVIRONMENT: made.environment}
        logs = [
            stack.enter_context(loggers()[name].open(out, table, list(past)))
            for name in _logger_names(options)
        ]
        with writing(out):
            # Unbuffered: a line that a full disk did not take must not be tried again on closing.
            file = stack.enter_context((out / METRICS).open("ab", buffering=0))

        def log(record: Mapping[str, Any]) -> None:
            for write_log in logs:
                write_log(record)

        def keep(snapshot: Snapshot) -> None:
            record = snapshot.history[snapshot.round - 1]
            with writing(out):
                file.write(line(record).encode())
            keep_checkpoint(snapshot)
            log(record)

        yield Recorder(keep, write, log)


@contextlib.contextmanager
def _write_checkpoints(
    out: Path, settings: Mapping[str, Any], options: RecordingOptions, done: int
) -> Iterator[tuple[Keep, Callable[[], None]]]:
    """Write checkpoints of the snapshots given; when the block ends, however, of the last one.

    done: the round that has a checkpoint already, 0 if there is none. A round that is the best so
    far waits in memory until the next checkpoint is due, and is then written before it.
    """
    latest: Snapshot | None = None
    best: Snapshot | None = None
    broken = False
    due_at = time.monotonic() + AT_LEAST

    def write() -> None:
        nonlocal done, best, due_at, broken
        if latest is None or latest.round <= done:
            return
        started = time.monotonic()
        waiting = best if best is not None and best.round < latest.round else None
        try:
            for snapshot in (waiting, latest):
                if snapshot is not None and snapshot.round > done:
                    save_checkpoint(out, snapshot, settings)
                    done = snapshot.round
        except FedpaError:
            broken = True
            raise
        best = None
        chosen = best_round(latest.stored.memory)
        prune_checkpoints(out, options.keep_checkpoints, [chosen] if chosen else [])
        ended = time.monotonic()
        due_at = ended + max(AT_LEAST, (ended - started) / SHARE)

    def keep(snapshot: Snapshot) -> None:
        nonlocal latest, best
        latest = snapshot
        if best_round(snapshot.stored.memory) == snapshot.round:
            best = snapshot
        every = options.checkpoint_every
        if snapshot.round % every == 0 if every is not None else time.monotonic() >= due_at:
            write()

    try:
        yield keep, write
    except BaseException as passing:
        if not broken:
            try:
                write()
            except FedpaError as error:  # beside what ended the run, not in its place
                passing.add_note(str(error))
                warnings.warn(str(error), stacklevel=2)
        raise
    write()


def finish(
    out: Path, params: Any, snapshot: Snapshot, last: Mapping[str, Any], about: Mapping[str, Any]
) -> History:
    """Write what a finished run leaves; `last` is what the end added to the last record."""
    history = History(snapshot.history[: snapshot.round])
    if history:
        history[-1] = {**history[-1], **last}
    run_directory.write_metrics(out, history)
    run_directory.save_params(out, params)
    # The last: its being there says that all the rest is.
    run_directory.write_summary(out, {**about, **_summarize(history, snapshot)})
    return history


def _summarize(history: History, snapshot: Snapshot) -> Record:
    last = history[-1] if history else {}
    ends = {name: value for name, value in last.items() if name.partition("/")[0] in _SPLITS}
    return {
        "round": snapshot.round,
        "stopped": snapshot.stopped,
        "best": best_of(snapshot.memory),
        "seconds": sum(record["seconds"] for record in history),
        "bytes_up": sum(record["comm/bytes_up"] for record in history),
        "bytes_down": sum(record["comm/bytes_down"] for record in history),
        "rejected": sum(record["train/rejected"] for record in history),
        **ends,
    }
