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
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedpa.errors import FedpaError, check_integer, match_name
from fedpa.training import run_directory
from fedpa.training.checkpoint import prune_checkpoints, save_checkpoint
from fedpa.training.history import History, line
from fedpa.training.loggers import LIBRARIES, TENSORBOARD, Write, check_loggers, open_logger
from fedpa.training.loop import Snapshot
from fedpa.training.run_directory import METRICS, writing
from fedpa.training.stopping import best_round

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
    asked = [match_name(word, LIBRARIES) or word for word in words]
    if TENSORBOARD not in asked and find_spec("tensorboardX") is not None:
        asked = [TENSORBOARD, *asked]
    return asked


class Place(NamedTuple):
    """Where and how a run is recorded."""

    out: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    """What the run is made with and of."""
    options: RecordingOptions
    about: Mapping[str, Any] = {}
    """What `summary.json` says of the run beside its numbers."""
    initial: Mapping[str, np.ndarray] | None = None
    """The arrays of a warm start: kept in the directory."""
    branch: Path | None = None
    """A run whose rounds this one would have had as its first, too: it starts from its end."""


@dataclasses.dataclass
class Recorder:
    """Records a run in its directory: a line per round, checkpoints when due, loggers."""

    place: Place
    lines: IO[bytes]
    """`metrics.jsonl`."""
    logs: Sequence[Write]
    done: int
    """The round that has a checkpoint already, 0 if there is none."""
    latest: Snapshot | None = None
    best: Snapshot | None = None
    """The best round so far: it waits in memory until the next checkpoint is due, and is then
    written before it."""
    due_at: float = dataclasses.field(default_factory=lambda: time.monotonic() + AT_LEAST)
    is_broken: bool = False
    """Whether a checkpoint could not be written."""

    def keep(self, snapshot: Snapshot) -> None:
        """Record a round, and write its checkpoint if one is due."""
        record = snapshot.history[snapshot.round - 1]
        with writing(self.place.out):
            self.lines.write(line(record).encode())
        self.latest = snapshot
        if best_round(snapshot.stored.memory) == snapshot.round:
            self.best = snapshot
        every = self.place.options.checkpoint_every
        if snapshot.round % every == 0 if every is not None else time.monotonic() >= self.due_at:
            self.write_checkpoint()
        self.log(record)

    def write_checkpoint(self) -> None:
        """Make sure that the last round has its checkpoint."""
        if self.latest is None or self.latest.round <= self.done:
            return
        started = time.monotonic()
        try:
            for snapshot in (self.best, self.latest):
                if snapshot is not None and snapshot.round > self.done:
                    save_checkpoint(self.place.out, snapshot, self.place.settings)
                    self.done = snapshot.round
        except FedpaError:
            self.is_broken = True
            raise
        self.best = None
        chosen = best_round(self.latest.stored.memory)
        keep = self.place.options.keep_checkpoints
        prune_checkpoints(self.place.out, keep, [chosen] if chosen else [])
        ended = time.monotonic()
        self.due_at = ended + max(AT_LEAST, (ended - started) / SHARE)

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a record to the loggers."""
        for write in self.logs:
            write(record)


@contextlib.contextmanager
def record_run(place: Place, start: Snapshot | None) -> Iterator[Recorder]:
    """Record a run; when the block ends, however, its last round has a checkpoint.

    start: where it continues from.
    """
    out = place.out
    past = start.history if start is not None else History()
    run_directory.write_metrics(out, past)
    table = {**place.settings, run_directory.ENVIRONMENT: place.environment}
    with contextlib.ExitStack() as stack:
        logs = [
            stack.enter_context(open_logger(name, out, table, list(past)))
            for name in _logger_names(place.options)
        ]
        with writing(out):
            # Unbuffered: a line that a full disk did not take must not be tried again on closing.
            lines = stack.enter_context((out / METRICS).open("ab", buffering=0))
        recorder = Recorder(place, lines, logs, start.round if start is not None else 0)
        try:
            yield recorder
        except BaseException as passing:
            if not recorder.is_broken:
                try:
                    recorder.write_checkpoint()
                except FedpaError as error:  # beside what ended the run, not in its place
                    passing.add_note(str(error))
                    warnings.warn(str(error), stacklevel=2)
            raise
        recorder.write_checkpoint()


def finish(
    out: Path,
    params: Any,
    history: History,
    stopped: str | None,
    best: Mapping[str, Any] | None,
    about: Mapping[str, Any],
) -> None:
    """Write what a finished run leaves."""
    run_directory.write_metrics(out, history)
    run_directory.save_params(out, params)
    last = history[-1].items()
    summary = {
        **about,
        "round": len(history),
        "stopped": stopped,
        "best": best,
        "seconds": sum(record["seconds"] for record in history),
        "bytes_up": sum(record["comm/bytes_up"] for record in history),
        "bytes_down": sum(record["comm/bytes_down"] for record in history),
        "rejected": sum(record["train/rejected"] for record in history),
        **{name: value for name, value in last if name.partition("/")[0] in _SPLITS},
    }
    run_directory.write_summary(out, summary)  # the last: it says that all the rest is there
