"""A run: started in a directory, resumed there, or not recorded at all.

`fedpa.fit` and the laboratory's runs assemble a `Training` and, if it is recorded, a `Place`; the
rest is here, in one order for both.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpa.algorithms.fedopt import Algorithm
from fedpa.atomic_write import write_directory
from fedpa.data.federated import FederatedData
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import Engine
from fedpa.errors import FedpaError
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Event, Remembering
from fedpa.training.checkpoint import (
    Stored,
    checkpoint_path,
    list_checkpoints,
    read_last_checkpoint,
    remove_checkpoints_after,
    restore_snapshot,
    save_checkpoint,
)
from fedpa.training.history import History, Record, plain
from fedpa.training.loop import Fit, Snapshot, begin, train
from fedpa.training.named_arrays import fill_tree, name_arrays, read_npz, write_npz
from fedpa.training.provenance import differences
from fedpa.training.recording import Recorder, RecordingOptions, finish, record_run
from fedpa.training.run_directory import Made, Recorded, lock_directory, read_run, writing
from fedpa.training.stopping import best_of, best_round
from fedpa.types import Params

NOT_COMPARED = ("rounds", "recording", "task_options.data_dir")
"""Settings that may differ when a run is resumed: none of a round's numbers depends on them (data
that was moved is known by its fingerprint)."""
INFORMATIVE = ("revision", "changed")
"""What is noted of the environment and may differ: where in its history the user's work was, and
what was not the same when the run was resumed anyway."""


class Training(NamedTuple):
    """What is trained, how and for how long."""

    algorithm: Algorithm
    theta: Params
    data: FederatedData
    assemble: Callable[[Params], Any]
    """θ → the model as the user gave it."""
    rounds: int
    clients_per_round: int
    seed: int
    engine: Engine | None
    min_success: float
    callbacks: Sequence[Callback]
    best: Remembering | None
    """The one of the callbacks that knows the best round."""
    at_end: Callable[[Any, Record], Mapping[str, Any]]
    """(the model, its round's record) → what the end adds to that record: tests; the evaluation of
    a round that turned out to be the last when a callback ended the run."""


class Place(NamedTuple):
    """Where and how a run is recorded."""

    out: Path
    made: Made
    options: RecordingOptions
    about: Mapping[str, Any] = {}
    """What `summary.json` says of the run beside its numbers."""
    initial: Mapping[str, np.ndarray] | None = None
    """The arrays of a warm start: kept in the directory."""
    branch: Path | None = None
    """A run whose rounds this one would have had as its first, too: it starts from its end."""


def start_run(training: Training, place: Place, overwrite: bool) -> Fit:
    """Train in a directory that contains no run, or whose run is to be overwritten.

    The caller has checked that the directory is free (`run_directory.check_free`).
    """
    with contextlib.ExitStack() as stack:
        start = None
        if is_first():
            stack.enter_context(_lock_empty_directory(place.out, overwrite))
            _prepare_directory(place, None)  # whatever a kill leaves is now known to be a run's
            start = _branch(training, place)
        return train_run(training, place, start)


def resume_run(training: Training, place: Place, anyway: bool = False) -> Fit:
    """Resume the run in the directory; a finished one is returned and not touched.

    anyway: resume although versions or data are not what they were.
    """
    out = place.out
    recorded = read_run(out)
    if from_first(lambda: recorded.is_finished(training.rounds)):
        # Nothing will be computed, so it does not matter by which versions.
        start = _restore(training, out, _find_checkpoint(recorded, place.made, anyway=True))
        fit = _read_finished(training, recorded, start)
        if fit is not None:
            return fit
    with contextlib.ExitStack() as stack:
        if is_first():
            if not os.access(out, os.W_OK | os.X_OK):
                raise FedpaError(f"{str(out)!r} is read-only: copy it and resume the copy")
            stack.enter_context(lock_directory(out))
        recorded = read_run(out)  # another process may have been at it until now
        start = _restore(training, out, _find_checkpoint(recorded, place.made, anyway))
        if start is None and recorded.summary is not None:
            raise FedpaError(
                f"{str(out)!r} is finished and its checkpoints are gone: nothing can be resumed"
            )
        if start is None and is_first():
            start = _branch(training, place)
        place = place._replace(made=_note_changes(recorded, place.made, start))
        if is_first():
            _prepare_directory(place, start)
        return train_run(training, place, start)


def train_run(training: Training, place: Place | None, start: Snapshot | None = None) -> Fit:
    """Train to the end, or until a callback says otherwise."""
    with contextlib.ExitStack() as stack:
        recorder = Recorder(lambda snapshot: None, lambda: None, lambda record: None)
        if place is not None and is_first():
            name_arrays(training.theta)  # refuses what could not be written at the end
            recorder = stack.enter_context(record_run(place.out, place.made, place.options, start))
        latest = start

        def keep(snapshot: Snapshot) -> None:
            nonlocal latest
            latest = snapshot
            recorder.keep(snapshot)

        fit = train(
            training.algorithm,
            training.theta,
            training.data,
            rounds=training.rounds,
            clients_per_round=training.clients_per_round,
            seed=training.seed,
            engine=training.engine,
            min_success=training.min_success,
            callbacks=training.callbacks,
            assemble=training.assemble,
            start=start,
            keep=keep,
        )
        if not fit.finished or latest is None:
            return fit
        recorder.write()  # now: a broken test split costs nothing but itself
        last = plain(training.at_end(fit.params, fit.history[-1]))
        latest = _evaluate_last(training, fit, latest, last)
        recorder.log({"round": latest.round, **last})
    if place is None or not is_first():
        history = History([*fit.history[:-1], fit.history[-1] | last])
    else:
        history = finish(place.out, fit.params, latest, last, place.about)
    return fit._replace(history=history, best=best_of(latest.memory))


def _evaluate_last(
    training: Training, fit: Fit, latest: Snapshot, last: Mapping[str, Any]
) -> Snapshot:
    """The best round may be one that was evaluated only because a callback ended the run."""
    if training.best is None:
        return latest
    record = {**fit.history[-1], **last}
    event = Event(latest.round, training.rounds, fit.params, fit.state, record)
    memory, _ = training.best.update(latest.memory[training.best.name], event)
    return latest._replace(memory={**latest.memory, training.best.name: memory})


@contextlib.contextmanager
def _lock_empty_directory(out: Path, overwrite: bool) -> Iterator[None]:
    """Hold the directory, with nothing of an earlier run in it."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        run_directory.check_free(out, overwrite)  # another process may have been there until now
        run_directory.clear(out)
        yield


def _prepare_directory(place: Place, start: Snapshot | None) -> None:
    """Write `config.toml`; remove rounds after `start`, and what an end left."""
    out = place.out
    run_directory.write_config(out, place.made.settings, place.made.environment)
    if place.initial is not None and not (out / run_directory.INIT).exists():
        with writing(out):
            write_npz(out / run_directory.INIT, place.initial)
    run_directory.remove_end(out)
    remove_checkpoints_after(out, start.round if start is not None else 0)


def _branch(training: Training, place: Place) -> Snapshot | None:
    """Where another run ended, as this run's past, with a checkpoint of its own."""
    source, out = place.branch, place.out
    if source is None:
        return None
    start = _restore(training, source, read_last_checkpoint(source))
    if start is None:
        raise FedpaError(f"{str(source)!r} has no checkpoint to start from")
    best = best_round(start.memory)
    if best in list_checkpoints(source) and best != start.round:
        with writing(out), write_directory(checkpoint_path(out, best)) as part:
            shutil.copytree(checkpoint_path(source, best), part, dirs_exist_ok=True)
    save_checkpoint(out, start, place.made.settings)
    return start


def _find_checkpoint(recorded: Recorded, made: Made, anyway: bool) -> Stored | None:
    """The last checkpoint of the recorded run, which must be the one that `made` describes."""
    out = recorded.out
    changed = _list_changes(recorded, made)
    if changed and not anyway:
        raise FedpaError(
            f"{str(out)!r} can't be resumed exactly: {'; '.join(changed)} "
            "(--anyway, or anyway=True in code, resumes it nevertheless)"
        )
    check_settings(out, recorded.made.settings, made.settings)
    stored = read_last_checkpoint(out)
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
    """Refuse other settings than those of the run in the directory."""
    changed = differences(then, now, NOT_COMPARED)
    if changed:
        raise FedpaError(
            f"{str(out)!r} can't be resumed: {'; '.join(changed)} "
            "(another directory, --overwrite, or overwrite=True in code starts again)"
        )


def _list_changes(recorded: Recorded, made: Made) -> list[str]:
    """What the run was made with and of, and is not any more."""
    if not recorded.made.environment:
        return ["config.toml has no table [environment]: what it was made with is not known"]
    return differences(recorded.made.environment, made.environment, INFORMATIVE)


def _note_changes(recorded: Recorded, made: Made, start: Snapshot | None) -> Made:
    """With a note of what has changed and when."""
    noted = list(recorded.made.environment.get("changed", []))
    after = start.round if start is not None else 0
    noted += [f"after round {after}: {change}" for change in _list_changes(recorded, made)]
    if not noted:
        return made
    return made._replace(environment={**made.environment, "changed": noted})


def _restore(training: Training, out: Path, stored: Stored | None) -> Snapshot | None:
    """The checkpoint as this training's; refused if it does not fit."""
    if stored is None:
        return None
    algorithm, theta = training.algorithm, training.theta
    if stored.round > training.rounds:
        raise FedpaError(
            f"rounds = {training.rounds}: {str(out)!r} has done {stored.round} already"
        )
    try:
        return restore_snapshot(
            stored, begin(algorithm, theta).state, theta, algorithm.client_init(theta)
        )
    except FedpaError as error:
        raise FedpaError(f"{str(out)!r} can't be resumed: {error}") from None


def _read_finished(training: Training, recorded: Recorded, start: Snapshot | None) -> Fit | None:
    """A finished run as its directory has it; None if that has lost something."""
    summary = recorded.summary or {}
    try:
        theta = fill_tree(training.theta, read_npz(recorded.out / run_directory.PARAMS))
        history = run_directory.read_metrics(recorded.out)
    except (OSError, ValueError):
        return None
    if len(history) != summary.get("round"):
        return None
    state = start.state if start is not None else None
    params, stopped, best = training.assemble(theta), summary["stopped"], summary.get("best")
    return Fit(params, history, state, stopped, best=best)
