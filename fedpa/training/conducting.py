"""From a loss, a model, data and a method to a run, recorded or not: what `fit` and `run` share."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpa.algorithms.algorithm import Algorithm
from fedpa.data.federated import FederatedData
from fedpa.engines.distributed import is_first
from fedpa.engines.engine import Engine
from fedpa.errors import FedpaError
from fedpa.training import checkpoints, run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoints import Stored
from fedpa.training.history import History, Record, plain
from fedpa.training.loop import Fit, beginning, train
from fedpa.training.recording import Made, Recorder, finish, recorded
from fedpa.training.recording_options import RecordingOptions
from fedpa.training.snapshot import Snapshot
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
    at_end: Callable[[Any, Record], Mapping[str, Any]]
    """(the model, its round's record) → what the end adds to that record."""


class Place(NamedTuple):
    """Where a run is recorded."""

    out: Path
    made: Made
    options: RecordingOptions
    stored: Stored | None
    """The checkpoint to go on from."""
    about: Mapping[str, Any]
    """What `summary.json` says of the run beside its numbers."""


def conduct(training: Training, place: Place | None) -> Fit:
    """Train to the end, or until a callback says otherwise."""
    with contextlib.ExitStack() as stack:
        recorder, start = _NOWHERE, None
        if place is not None:
            start = _start(training, place)
            if is_first():
                recorder = stack.enter_context(recorded(*place[:3], start))
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
        recorder.log({"round": latest.round, **last})
    if place is None or not is_first():
        history = History([*fit.history[:-1], fit.history[-1] | last])
    else:
        history = finish(place.out, fit.params, latest, last, place.about)
    return fit._replace(history=history)


_NOWHERE = Recorder(lambda snapshot: None, lambda: None, lambda record: None)


def _start(training: Training, place: Place) -> Snapshot | None:
    if place.stored is None:
        return None
    algorithm, theta = training.algorithm, training.theta
    if place.stored.round > training.rounds:
        raise FedpaError(
            f"rounds = {training.rounds}: {str(place.out)!r} has done {place.stored.round} already"
        )
    try:
        return checkpoints.restored(
            place.stored, beginning(algorithm, theta).state, theta, algorithm.client_init(theta)
        )
    except FedpaError as error:
        raise FedpaError(f"{str(place.out)!r} can't be resumed: {error}") from None


def finished(training: Training, place: Place) -> Fit:
    """A run that is over already, as its directory has it."""
    start = _start(training, place)
    arrays = run_directory.read_arrays(place.out / run_directory.PARAMS)
    theta = checkpoints.filled(training.theta, arrays, "")
    history = run_directory.read_metrics(place.out)
    summary = run_directory.read_summary(place.out) or {}
    state = start.state if start is not None else None
    return Fit(training.assemble(theta), history, state, summary.get("stopped"))
