"""From a loss, a model, data and a method to a run, recorded or not: what `fit` and `run` share."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.algorithms.fedopt import Algorithm
from fedpa.data.federated import FederatedData
from fedpa.engines.distributed import is_first
from fedpa.engines.engine import Engine
from fedpa.errors import FedpaError
from fedpa.training import checkpoints, run_directory
from fedpa.training.callbacks import Callback, Event, Remembering
from fedpa.training.checkpoints import Stored
from fedpa.training.history import History, Record, plain
from fedpa.training.loop import Fit, beginning, train
from fedpa.training.named_arrays import filled, named
from fedpa.training.recording import Made, Recorder, finish, recorded
from fedpa.training.recording_options import RecordingOptions
from fedpa.training.saving import best_of
from fedpa.training.snapshot import Snapshot
from fedpa.training.whole_files import read_npz
from fedpa.types import Params


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
    """Where a run is recorded."""

    out: Path
    made: Made
    options: RecordingOptions
    start: Snapshot | None
    """Where it goes on; None: before the first round."""
    about: Mapping[str, Any]
    """What `summary.json` says of the run beside its numbers."""


def conduct(training: Training, place: Place | None) -> Fit:
    """Train to the end, or until a callback says otherwise."""
    with contextlib.ExitStack() as stack:
        recorder, start = _NOWHERE, None
        if place is not None:
            start = place.start
            if is_first():
                named(training.theta)  # refuses what could not be written at the end
                recorder = stack.enter_context(recorded(*place[:4]))
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
        latest = _with_last_evaluation(training, fit, latest, last)
        recorder.log({"round": latest.round, **last})
    if place is None or not is_first():
        history = History([*fit.history[:-1], fit.history[-1] | last])
    else:
        history = finish(place.out, fit.params, latest, last, place.about)
    return fit._replace(history=history, best=best_of(latest.memory))


def _with_last_evaluation(
    training: Training, fit: Fit, latest: Snapshot, last: Mapping[str, Any]
) -> Snapshot:
    """The best round may be one that was evaluated only because a callback ended the run."""
    if training.best is None:
        return latest
    record = {**fit.history[-1], **last}
    event = Event(latest.round, training.rounds, fit.params, fit.state, record)
    memory, _ = training.best.update(latest.memory[training.best.name], event)
    return latest._replace(memory={**latest.memory, training.best.name: memory})


_NOWHERE = Recorder(lambda snapshot: None, lambda: None, lambda record: None)


def started(training: Training, out: Path, stored: Stored | None) -> Snapshot | None:
    """The checkpoint as this training's; refused if it does not fit."""
    if stored is None:
        return None
    algorithm, theta = training.algorithm, training.theta
    if stored.round > training.rounds:
        raise FedpaError(
            f"rounds = {training.rounds}: {str(out)!r} has done {stored.round} already"
        )
    try:
        return checkpoints.restored(
            stored, beginning(algorithm, theta).state, theta, algorithm.client_init(theta)
        )
    except FedpaError as error:
        raise FedpaError(f"{str(out)!r} can't be resumed: {error}") from None


def given_back(training: Training, out: Path, start: Snapshot | None) -> Fit | None:
    """A finished run as its directory has it; None if that has lost something."""
    summary = run_directory.read_summary(out) or {}
    try:
        arrays = read_npz(out / run_directory.PARAMS)
        theta = filled(training.theta, arrays)
        history = run_directory.read_metrics(out)
    except (OSError, ValueError):
        return None
    if len(history) != summary.get("round"):
        return None
    state = start.state if start is not None else None
    params, stopped, best = training.assemble(theta), summary["stopped"], summary.get("best")
    return Fit(params, history, state, stopped, best=best)
