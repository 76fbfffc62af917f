"""A run that is recorded as it goes: its directory is locked, written to, and can be resumed.

What happens at a kill, and why nothing is lost or doubled: a round's record goes to `metrics.jsonl`
before its checkpoint is written, and a checkpoint holds all records up to its round. Resuming takes
the last whole checkpoint and writes `metrics.jsonl` anew from it, so whatever came after it, whole
or torn, is gone, and is computed again with the same result.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.errors import FedpaError
from fedpa.training import checkpoints, run_directory
from fedpa.training.checkpoints import Stored
from fedpa.training.history import History, Record, line
from fedpa.training.loggers.logger import loggers
from fedpa.training.provenance import differences
from fedpa.training.recording_options import RecordingOptions, logger_names
from fedpa.training.run_directory import METRICS, writing
from fedpa.training.saving import best_of, saved
from fedpa.training.snapshot import Keep, Snapshot
from fedpa.training.whole_files import write_npz

NOT_COMPARED = ("rounds", "recording", "task_options.data_dir")
"""Settings that may differ when a run is resumed: none of a round's numbers depends on them (data
that was moved is known by its fingerprint)."""
INFORMATIVE = ("revision", "changed")
"""What is noted of the environment and may differ: where in its history the user's work was, and
what was not the same when the run was resumed anyway."""


_SPLITS = ("eval", "valid", "test")


class Made(NamedTuple):
    """What decides a run's numbers."""

    settings: Mapping[str, Any]
    environment: Mapping[str, Any]


def begin(out: Path, made: Made, start: Snapshot | None, initial: Any = None) -> None:
    """Write `config.toml` of a new run, whose directory is empty, or of one that goes on.

    start: where it goes on; rounds behind that are removed, and what an end left.
    initial: the arrays of a warm start: what a run starts from is its own from now on.
    """
    run_directory.write_config(out, made.settings, made.environment)
    if initial is not None and not (out / run_directory.INIT).exists():
        with writing(out):
            write_npz(out / run_directory.INIT, initial)
    run_directory.remove_end(out)
    checkpoints.remove_after(out, start.round if start is not None else 0)


def found(out: Path, made: Made, anyway: bool = False) -> Stored | None:
    """The last whole checkpoint of the run that lies there, which must be the one `made` describes.

    anyway: go on although versions or data are not what they were.
    """
    settings, _ = run_directory.read_config(out)
    changed = changes(out, made)
    if changed and not anyway:
        raise FedpaError(
            f"{str(out)!r} can't be resumed exactly: {'; '.join(changed)} "
            "(--anyway, or anyway=True in code, goes on nevertheless)"
        )
    check_settings(out, settings, made.settings)
    stored = checkpoints.last(out)
    if stored is None:
        return None
    changed = differences(stored.settings, made.settings, NOT_COMPARED)
    if changed:
        raise FedpaError(
            f"{str(out)!r} can't be resumed: since its checkpoint of round {stored.round}, "
            f"{'; '.join(changed)}"
        )
    return stored


def check_settings(out: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse other settings than those of the run that lies there."""
    changed = differences(then, now, NOT_COMPARED)
    if changed:
        raise FedpaError(
            f"{str(out)!r} can't be resumed: {'; '.join(changed)} "
            "(another directory, --overwrite, or overwrite=True in code starts anew)"
        )


def changes(out: Path, made: Made) -> list[str]:
    """What the run was made with and of, and is not any more."""
    if not run_directory.is_run(out):
        return ["config.toml has no table [environment]: what it was made with is not known"]
    return differences(run_directory.read_config(out)[1], made.environment, INFORMATIVE)


def admitted(out: Path, made: Made, start: Snapshot | None) -> Made:
    """With a note of what has changed and when, for those who look at the numbers."""
    noted = list(run_directory.read_config(out)[1].get("changed", []))
    after = start.round if start is not None else 0
    noted += [f"after round {after}: {change}" for change in changes(out, made)]
    if not noted:
        return made
    return made._replace(environment={**made.environment, "changed": noted})


class Recorder(NamedTuple):
    keep: Keep
    """Record a round."""
    write: Callable[[], None]
    """Make sure that the last round has its checkpoint."""
    log: Callable[[Mapping[str, Any]], None]
    """Send loggers what the end adds to the last record."""


@contextlib.contextmanager
def recorded(
    out: Path, made: Made, options: RecordingOptions, start: Snapshot | None
) -> Iterator[Recorder]:
    """Record a run as it goes; `start` is where it continues from."""
    past = start.history if start is not None else History()
    done = start.round if start is not None else 0
    run_directory.write_metrics(out, past)
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(saved(out, made.settings, options, done))
        table = {**made.settings, run_directory.ENVIRONMENT: made.environment}
        logs = [
            stack.enter_context(loggers()[name].open(out, table, list(past)))
            for name in logger_names(options)
        ]
        with writing(out):
            # Unbuffered: a line that a full disk did not take must not be tried again on closing.
            file = stack.enter_context((out / METRICS).open("ab", buffering=0))

        def log(record: Mapping[str, Any]) -> None:
            for write in logs:
                write(record)

        def keep(snapshot: Snapshot) -> None:
            record = snapshot.history[snapshot.round - 1]
            with writing(out):
                file.write(line(record).encode())
            saver.keep(snapshot)
            log(record)

        yield Recorder(keep, saver.write, log)


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
    run_directory.write_summary(out, {**about, **summary(history, snapshot)})
    return history


def summary(history: History, snapshot: Snapshot) -> Record:
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
