"""A run: assembled once, then started in a directory, resumed there, or not recorded at all.

`fedpa.fit` and the laboratory's runs make a `Training` and, if it is recorded, a `Place`; the rest
is here, in one order for both.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.atomic_write import write_directory
from fedpa.data.federated import FederatedData
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, refuse
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Evaluate, Event, at_rounds
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
from fedpa.training.loop import Fit, Snapshot, train
from fedpa.training.named_arrays import fill_tree, name_arrays, read_npz, write_npz
from fedpa.training.problem import Prepared
from fedpa.training.provenance import differences
from fedpa.training.recording import Place, finish, record_run
from fedpa.training.run_directory import Recorded, lock_directory, read_run, writing
from fedpa.training.stopping import Best, best_of, best_round, remember_best

NOT_COMPARED = ("rounds", "recording", "task_options.data_dir")
"""Settings that may differ when a run is resumed: none of a round's numbers depends on them (data
that was moved is known by its fingerprint)."""
INFORMATIVE = ("revision", "changed")
"""What is noted of the environment and may differ: where in its history the user's work was, and
what was not the same when the run was resumed anyway."""


class Training(NamedTuple):
    """What is trained, how and for how long."""

    prepared: Prepared
    data: FederatedData
    engine: Engine
    rounds: int
    clients_per_round: int
    seed: int
    min_success: float
    evaluate: Evaluate | None
    """model → metrics by their whole names: eval/accuracy."""
    eval_every: int
    callbacks: Sequence[Callback]
    """Called after the evaluation."""
    best: Best | None
    """By which metric the best round is chosen."""
    test: Callable[[Any, Record], Mapping[str, Any]] | None = None
    """(the model at the end, the last record) → metrics to add to that."""


def connect_engine(engine: Any, prepared: Prepared) -> tuple[Prepared, Engine]:
    """Make the engine for the algorithm, if it has to know that: what the round loop runs."""
    if isinstance(engine, OfAlgorithm):
        algorithm, engine = engine.make(prepared.algorithm, prepared.theta)
        prepared = prepared._replace(algorithm=algorithm)
    if not callable(engine):
        raise refuse("engine", engine, "must be an engine, for example fedpa.engines.local()")
    return prepared, engine


def start_run(training: Training, place: Place, overwrite: bool = False) -> Fit:
    """Train in a directory that contains no run, or whose run is to be overwritten."""
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
        fit = _read_finished(training, recorded, _find_start(training, recorded, place, True))
        if fit is not None:
            return fit
    with contextlib.ExitStack() as stack:
        if is_first():
            if not os.access(out, os.W_OK | os.X_OK):
                raise FedpaError(f"{str(out)!r} is read-only: copy it and resume the copy")
            stack.enter_context(lock_directory(out))
        recorded = read_run(out)  # another process may have been at it until now
        start = _find_start(training, recorded, place, anyway)
        if start is None and recorded.summary is not None:
            raise FedpaError(
                f"{str(out)!r} is finished and its checkpoints are gone: nothing can be resumed"
            )
        if start is None and is_first():
            start = _branch(training, place)
        after = start.round if start is not None else 0
        changed = [f"after round {after}: {change}" for change in _list_changes(recorded, place)]
        changed = [*recorded.environment.get("changed", []), *changed]
        if changed:
            place = place._replace(environment={**place.environment, "changed": changed})
        if is_first():
            _prepare_directory(place, start)
        return train_run(training, place, start)


def train_run(training: Training, place: Place | None, start: Snapshot | None = None) -> Fit:
    """Train to the end, or until a callback says otherwise."""
    algorithm, theta, assemble, _ = training.prepared
    evaluate, best = training.evaluate, training.best
    evaluations = [] if evaluate is None else [at_rounds(evaluate, training.eval_every)]
    remembering = None if best is None else remember_best(best)
    latest, recorder = start, None
    with contextlib.ExitStack() as stack:
        if place is not None and is_first():
            name_arrays(theta)  # refuses what could not be written at the end
            recorder = stack.enter_context(record_run(place, start))

        def keep(snapshot: Snapshot) -> None:
            nonlocal latest
            latest = snapshot
            if recorder is not None:
                recorder.keep(snapshot)

        fit = train(
            algorithm,
            theta,
            training.data,
            rounds=training.rounds,
            clients_per_round=training.clients_per_round,
            seed=training.seed,
            engine=training.engine,
            min_success=training.min_success,
            callbacks=[
                *evaluations,
                *training.callbacks,
                *([] if remembering is None else [remembering]),
            ],
            assemble=assemble,
            start=start,
            keep=keep,
        )
        if not fit.finished or latest is None:
            return fit
        if recorder is not None:
            recorder.write_checkpoint()  # now: a broken test split costs nothing but itself
        record, memory = fit.history[-1], latest.memory
        if evaluate is not None and not any(name.startswith("eval/") for name in record):
            # It turned out to be the last when a callback ended the run.
            record = record | plain(evaluate(fit.params))
        if training.test is not None:
            record = record | plain(training.test(fit.params, record))
        if remembering is not None:
            event = Event(latest.round, training.rounds, fit.params, fit.state, record)
            remembered, _ = remembering.update(memory[remembering.name], event)
            memory = {**memory, remembering.name: remembered}
        if recorder is not None:
            added = {name: record[name] for name in record if name not in fit.history[-1]}
            recorder.log({"round": latest.round, **added})
    history = History([*fit.history[:-1], record])
    chosen = best_of(memory)
    if place is not None and is_first():
        finish(place.out, fit.params, history, fit.stopped, chosen, place.about)
    return fit._replace(history=history, best=chosen)


@contextlib.contextmanager
def _lock_empty_directory(out: Path, overwrite: bool) -> Iterator[None]:
    """Hold the directory, with nothing of an earlier run in it."""
    run_directory.check_free(out, overwrite)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        run_directory.check_free(out, overwrite)  # another process may have been there until now
        run_directory.clear(out)
        yield


def _prepare_directory(place: Place, start: Snapshot | None) -> None:
    """Write `config.toml`; remove rounds after `start`, and what an end left."""
    out = place.out
    run_directory.write_config(out, place.settings, place.environment)
    if place.initial is not None and not (out / run_directory.INIT).exists():
        with writing(out):
            write_npz(out / run_directory.INIT, place.initial)
    run_directory.remove_end(out)
    remove_checkpoints_after(out, start.round if start is not None else 0)


def _branch(training: Training, place: Place) -> Snapshot | None:
    """Take the end of another run as this run's past, with a checkpoint of its own."""
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
    save_checkpoint(out, start, place.settings)
    return start


def _find_start(
    training: Training, recorded: Recorded, place: Place, anyway: bool
) -> Snapshot | None:
    """Find the last checkpoint of the recorded run, which must be the one that `place` describes.

    A checkpoint has the settings it was written with: `config.toml` may have been edited since.
    """
    out = recorded.out
    changed = _list_changes(recorded, place)
    if changed and not anyway:
        raise FedpaError(
            f"{str(out)!r} can't be resumed exactly: {'; '.join(changed)} "
            "(--anyway, or anyway=True in code, resumes it nevertheless)"
        )
    check_settings(out, recorded.settings, place.settings)
    stored = read_last_checkpoint(out)
    if stored is not None:
        check_settings(out, stored.settings, place.settings)
    return _restore(training, out, stored)


def check_settings(out: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse other settings than those of the run in the directory."""
    changed = differences(then, now, NOT_COMPARED)
    if changed:
        raise FedpaError(
            f"{str(out)!r} can't be resumed: {'; '.join(changed)} "
            "(another directory, --overwrite, or overwrite=True in code starts again)"
        )


def _list_changes(recorded: Recorded, place: Place) -> list[str]:
    """What the run was made with and of, and is not any more."""
    if not recorded.environment:
        return ["config.toml has no table [environment]: what it was made with is not known"]
    return differences(recorded.environment, place.environment, INFORMATIVE)


def _restore(training: Training, out: Path, stored: Stored | None) -> Snapshot | None:
    """The checkpoint as this training's; refused if it does not fit."""
    if stored is None:
        return None
    algorithm, theta, *_ = training.prepared
    if stored.round > training.rounds:
        raise FedpaError(
            f"rounds = {training.rounds}: {str(out)!r} has done {stored.round} already"
        )
    try:
        return restore_snapshot(stored, algorithm.init(theta), theta, algorithm.client_init(theta))
    except FedpaError as error:
        raise FedpaError(f"{str(out)!r} can't be resumed: {error}") from None


def _read_finished(training: Training, recorded: Recorded, start: Snapshot | None) -> Fit | None:
    """A finished run as its directory has it; None if that has lost something."""
    summary = recorded.summary or {}
    try:
        theta = fill_tree(training.prepared.theta, read_npz(recorded.out / run_directory.PARAMS))
        history = run_directory.read_metrics(recorded.out)
    except (OSError, ValueError):
        return None
    if len(history) != summary.get("round"):
        return None
    state = start.state if start is not None else None
    params, stopped, best = (
        training.prepared.assemble(theta),
        summary["stopped"],
        summary.get("best"),
    )
    return Fit(params, history, state, stopped, best=best)
