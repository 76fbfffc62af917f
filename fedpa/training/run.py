"""A run: started or resumed in a directory, or not recorded.

`fedpa.fit` and the laboratory's runs make a `Training` and, if it is recorded, a `Place`; this
module does the rest for both.

A kill neither loses nor duplicates records: a round's record goes to `metrics.jsonl` before its
checkpoint is written, and a checkpoint contains all records up to its round. Resuming rewrites
`metrics.jsonl` from the last checkpoint. Later records, complete or not, are dropped and computed
again with the same result. No result of a run depends on when checkpoints are written.
"""

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fedpa.algorithms.switch import AUTO
from fedpa.data.federated import FederatedData
from fedpa.data.readers.npz import read_npz
from fedpa.engines import ENGINES
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, check_integer, check_takes, match_name, refuse
from fedpa.privacy.ledger import LEDGER
from fedpa.server.aggregation import check_cohort
from fedpa.training import run_directory
from fedpa.training.callbacks import (
    AT_PLATEAU,
    Best,
    Callback,
    Evaluate,
    Event,
    at_rounds,
    best_of,
    best_round,
    remember_best,
)
from fedpa.training.checkpoint import (
    Stored,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    read_last_checkpoint,
    remove_checkpoints_after,
    restore_snapshot,
    save_checkpoint,
)
from fedpa.training.history import History, Record, line, plain
from fedpa.training.loggers import LIBRARIES, TENSORBOARD, Write, check_loggers, open_logger
from fedpa.training.loop import Fit, Snapshot, train
from fedpa.training.named_arrays import fill_tree, name_arrays, write_npz
from fedpa.training.options import StorageOptions
from fedpa.training.privacy import check_private
from fedpa.training.problem import Prepared
from fedpa.training.provenance import differences
from fedpa.training.run_directory import METRICS, Recorded, lock_directory, read_run, writing

NOT_COMPARED = (
    "rounds",
    "evaluate",
    "label",
    "recording",
    "model",
    "federation",
    "task_options.data_dir",
    "privacy.max_epsilon",
    "privacy.force",
    "hyperparameters.force",
    "hyperparameters.max_epsilon",
)
"""Settings that may differ when a run is resumed: no number depends on them, or a fingerprint
covers them (the sizes of model and data, the location of the data)."""
INFORMATIVE = ("revision", "changed")
"""Parts of the environment that may differ: the user's git revision, and notes about forced
resumes."""
COMPUTED_WITH = ("versions", "source", "machine")
"""Parts that may also differ if the run is finished, since nothing is computed."""
AT_LEAST = 10.0
"""Default seconds between checkpoints: the most that a kill loses, besides a round."""
SHARE = 0.05
"""Largest share of a run's time for writing them."""
_SPLITS = ("eval", "valid", "test")


# Recording: when checkpoints are written, which are kept, where records go.


@dataclasses.dataclass(frozen=True)
class RecordingOptions(StorageOptions):
    """How `fedpa.fit` labels and records a run. It does not change the run's numbers.

    Args:
        checkpoint_every: Rounds from one checkpoint to the next, at least 1 (default: one about
            every ten seconds, fewer where writing takes long).
        keep_checkpoints: Number of latest checkpoints to keep, at least 1; the best is kept, too
            (default: 3).
        log: More places for records: "wandb", "mlflow" or "wandb,mlflow" (default: none).
        label: What progress, results and reports call the run; default: the method and what it must
            be told, "FedPA, ρ = 0.1".
        best: The metric whose best round is reported and keeps its checkpoint: "eval/accuracy", or
            `Best("eval/score", lower=True)` (default: None).
        overwrite: Start again, whatever run the directory contains (default: False).
        force: Resume although versions or data have changed; the result is then not exact (default:
            False).
    Example:
        >>> options = RecordingOptions(label="mine", best="eval/mse", checkpoint_every=10)
        >>> options.label, options.keep_checkpoints
        ('mine', 3)
    """

    label: str | None = None
    best: Best | str | None = None
    overwrite: bool = False
    force: bool = False


def check_storage(options: StorageOptions) -> None:
    """Refuse values out of range, and loggers that are not available."""
    if options.checkpoint_every is not None:
        check_integer("checkpoint_every", options.checkpoint_every, 1)
    check_integer("keep_checkpoints", options.keep_checkpoints, 1)
    check_loggers(_logger_names(options))


def _logger_names(options: StorageOptions) -> list[str]:
    """List the loggers: TensorBoard if tensorboardX is installed, then the requested ones."""
    words = [word.strip() for word in (options.log or "").split(",") if word.strip()]
    asked = [match_name(word, LIBRARIES) or word for word in words]
    if TENSORBOARD not in asked and find_spec("tensorboardX") is not None:
        asked = [TENSORBOARD, *asked]
    return asked


class Remedies(NamedTuple):
    """The options that override a refusal, for messages."""

    force: str = ""
    """Option to resume although versions or data have changed."""
    overwrite: str = ""
    """Option to start again in the same directory."""


class Place(NamedTuple):
    """Where and how a run is recorded."""

    out: Path
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    """The table `[environment]`."""
    options: StorageOptions
    about: Mapping[str, Any] = {}
    """Entries of `summary.json` besides numbers."""
    initial: Mapping[str, np.ndarray] | None = None
    """The arrays of a warm start, stored in the directory."""
    branch: Path | None = None
    """A run that equals this one's first rounds: this run starts from its end."""
    remedies: Remedies = Remedies()


@dataclasses.dataclass
class Recorder:
    """Records a run in its directory: a line per round, checkpoints when due, loggers."""

    place: Place
    lines: IO[bytes]
    """`metrics.jsonl`."""
    logs: Sequence[Write]
    done: int
    """The last round that has a checkpoint, or 0."""
    latest: Snapshot | None = None
    best: Snapshot | None = None
    """The best round so far, kept in memory until the next checkpoint is due and written before
    it."""
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
    """Record a run; when the block ends, in any way, its last round has a checkpoint.

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
            # Unbuffered: a line that failed on a full disk must not be written again on closing.
            lines = stack.enter_context((out / METRICS).open("ab", buffering=0))
        recorder = Recorder(place, lines, logs, start.round if start is not None else 0)
        try:
            yield recorder
        except BaseException as passing:
            if not recorder.is_broken:
                try:
                    recorder.write_checkpoint()
                except (
                    FedpaError
                ) as error:  # added to the error that ended the run, not in its place
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
    """Write the final files of a run."""
    run_directory.write_metrics(out, history)
    run_directory.save_params(out, params)
    last = history[-1].items()
    summary = {
        **about,
        "round": len(history),
        "stopped": stopped,
        "best": best,
        "seconds": sum(record["seconds"] for record in history),
        "bytes_up": sum(record.get("comm/bytes_up", 0) for record in history),
        "bytes_down": sum(record.get("comm/bytes_down", 0) for record in history),
        "rejected": sum(record.get("train/rejected", 0) for record in history),
        **{name: value for name, value in last if name.partition("/")[0] in _SPLITS},
    }
    summary["digest"] = run_directory.digest_result(out, summary)
    run_directory.write_summary(out, summary)  # written last: it marks the run as finished


# Starting, resuming, training.


class Training(NamedTuple):
    """The training: algorithm, data, rounds, evaluation."""

    prepared: Prepared
    data: FederatedData
    engine: Engine
    rounds: int
    clients_per_round: int
    seed: int
    min_success: float
    evaluate: Evaluate | None
    """model → metrics by their full names: eval/accuracy."""
    eval_every: int
    callbacks: Sequence[Callback]
    """Called after the evaluation."""
    best: Best | None
    """The metric of the best round."""
    test: Callable[[Any, Record], Mapping[str, Any]] | None = None
    """(the final model, the last record) → metrics to add to it."""
    label: str = ""
    """Its label in the result."""


def connect_engine(engine: Any, prepared: Prepared) -> tuple[Prepared, Engine]:
    """Connect the engine to the algorithm, if it needs it; return what the round loop runs."""
    if isinstance(engine, OfAlgorithm):
        if prepared.algorithm.switch is not None:
            raise refuse(
                "burn_in_rounds", AUTO, "is not supported on other machines: give a number"
            )
        algorithm, engine = engine.make(prepared.algorithm, prepared.theta)
        prepared = prepared._replace(algorithm=algorithm)
    if not callable(engine):
        raise refuse("engine", engine, "must be an engine, for example fedpa.engines.local()")
    if engine in ENGINES.values():
        name = engine.__name__
        raise FedpaError(f"engine = {name}: must be called, fedpa.engines.{name}()")
    check_takes("engine", engine, "(client update, aggregation, message, cohort)")
    return prepared, engine


def start_run(training: Training, place: Place, overwrite: bool = False) -> Fit:
    """Train in a directory that contains no run, or whose run is to be overwritten."""
    _check_algorithm(training)
    with contextlib.ExitStack() as stack:
        start = None
        if is_first():
            stack.enter_context(_lock_empty_directory(place, overwrite))
            _prepare_directory(
                place, None
            )  # from here on a kill leaves a directory that is known as a run
            start = _branch(training, place)
        return train_run(training, place, start)


def resume_run(training: Training, place: Place, force: bool = False) -> Fit:
    """Resume the run in the directory; a finished one is returned unchanged.

    Both are refused for other settings, data or initial parameters.

    force: resume although versions or data have changed.
    """
    _check_algorithm(training, more=False)
    out = place.out
    release = training.prepared.algorithm.release
    if (out / LEDGER).exists() and (release is None or release.ledger is None):
        raise FedpaError(
            f"{str(out)!r} is a private run over Flower: `flwr run` resumes it, and counts its "
            "releases"
        )
    recorded = read_run(out)
    if from_first(lambda: recorded.is_finished(training.rounds)):
        start = _find_start(training, recorded, place, force, COMPUTED_WITH)
        fit = _read_finished(training, recorded, start)
        if fit is not None:
            return fit
    with contextlib.ExitStack() as stack:
        if is_first():
            if not os.access(out, os.W_OK | os.X_OK):
                raise FedpaError(f"{str(out)!r} is read-only: copy it and resume the copy")
            stack.enter_context(lock_directory(out))
        recorded = read_run(out)  # another process may have changed it until now
        start = _find_start(training, recorded, place, force)
        if start is None and recorded.summary is not None:
            raise FedpaError(
                f"{str(out)!r} is finished and has no checkpoints: it can't be extended"
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


def _check_algorithm(training: Training, more: bool = True) -> None:
    """Refuse small cohorts and what a private run can't do, before anything is written.

    more: rounds that will be run.
    """
    algorithm, clients = training.prepared.algorithm, len(training.data.ids)
    if algorithm.release is not None:  # refuses what can be seen from its state alone
        jax.eval_shape(algorithm.init, training.prepared.theta)
    size = min(training.clients_per_round, clients)
    check_cohort(algorithm.aggregation, "clients_per_round", size)
    check_private(algorithm, clients, training.clients_per_round, training.min_success, more=more)


def train_run(training: Training, place: Place | None, start: Snapshot | None = None) -> Fit:
    """Train to the end, or until a callback stops it."""
    algorithm, theta, assemble, _ = training.prepared
    evaluate, best = training.evaluate, training.best
    evaluations = [] if evaluate is None else [at_rounds(evaluate, training.eval_every)]
    remembering = None if best is None else remember_best(best)
    latest, recorder = start, None
    with contextlib.ExitStack() as stack:
        if place is not None and is_first():
            name_arrays(theta)  # refuses parameters that could not be written at the end
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
        fit = fit._replace(label=training.label, out=None if place is None else place.out)
        if not fit.finished or latest is None:
            return fit
        if recorder is not None:
            recorder.write_checkpoint()  # after saving, in case the test split fails
        record, memory = fit.history[-1], latest.memory
        if evaluate is not None and not any(name.startswith("eval/") for name in record):
            # A callback may have made this the last round.
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
def _lock_empty_directory(place: Place, overwrite: bool) -> Iterator[None]:
    """Lock the directory and remove files of an earlier run."""
    out, remedy = place.out, place.remedies.overwrite
    run_directory.check_free(out, overwrite, remedy)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        run_directory.check_free(out, overwrite, remedy)  # another process may have changed it
        run_directory.clear(out)
        yield


def _prepare_directory(place: Place, start: Snapshot | None) -> None:
    """Write `config.toml`; remove rounds after `start` and final files."""
    out = place.out
    run_directory.write_config(out, place.settings, place.environment)
    if place.initial is not None and not (out / run_directory.INIT).exists():
        with writing(out):
            write_npz(out / run_directory.INIT, place.initial)
    run_directory.remove_end(out)
    remove_checkpoints_after(out, start.round if start is not None else 0)


def _branch(training: Training, place: Place) -> Snapshot | None:
    """Copy the end of another run as this run's past, with its own checkpoints.

    Training there may be burn-in here: records get this run's names of phases. Where that run ended
    at the plateau, this one continues.
    """
    source, name_phase = place.branch, training.prepared.algorithm.phase
    if source is None:
        return None

    if read_run(source).environment.get("data") != place.environment.get("data"):
        raise refuse("branch", str(source), "is a run on other data: nothing of it can be shared")

    def rename(record: Record) -> Record:
        return record | {"phase": name_phase(record["round"] - 1)}

    def take_over(stored: Stored | None) -> Snapshot:
        snapshot = _restore(training, source, stored)
        if snapshot is None:
            raise FedpaError(f"{str(source)!r} has no checkpoint to start from")
        own = snapshot._replace(
            history=History(map(rename, snapshot.history)),
            stopped=None if snapshot.stopped == AT_PLATEAU else snapshot.stopped,
            untold=None if snapshot.untold is None else rename(snapshot.untold),
        )
        save_checkpoint(place.out, own, place.settings)
        return own

    last = read_last_checkpoint(source)
    best = 0 if last is None else best_round(last.memory) or 0
    if last is not None and best != last.round and best in list_checkpoints(source):
        take_over(read_checkpoint(source, best))
    return take_over(last)


def _find_start(
    training: Training,
    recorded: Recorded,
    place: Place,
    force: bool,
    may_differ: Sequence[str] = (),
) -> Snapshot | None:
    """Find the last checkpoint of the recorded run, which must match `place`.

    A checkpoint contains its settings, since `config.toml` may have been edited.

    may_differ: fields of the environment.
    """
    out = recorded.out
    changed = _list_changes(recorded, place, may_differ)
    if changed and not force:
        remedy = place.remedies.force
        nevertheless = f" ({remedy} resumes it anyway)" if remedy else ""
        raise FedpaError(
            f"{str(out)!r} can't be resumed exactly: {'; '.join(changed)}{nevertheless}"
        )
    check_settings(out, recorded.settings, place.settings, place.remedies.overwrite)
    stored = read_last_checkpoint(out)
    if stored is not None:
        check_settings(out, stored.settings, place.settings, place.remedies.overwrite)
    return _restore(training, out, stored)


def check_settings(
    out: Path, then: Mapping[str, Any], now: Mapping[str, Any], overwrite: str = ""
) -> None:
    """Refuse other settings than those of the run in the directory.

    overwrite: as in `Remedies`.
    """
    changed = differences(then, now, NOT_COMPARED)
    if changed:
        again = "another directory" + (f" or {overwrite}" if overwrite else "")
        raise FedpaError(
            f"{str(out)!r} can't be resumed: {'; '.join(changed)} ({again} starts again)"
        )


def _list_changes(recorded: Recorded, place: Place, may_differ: Sequence[str] = ()) -> list[str]:
    """List the differences between the run's environment and the current one."""
    if not recorded.environment:
        return ["config.toml has no table [environment]"]
    return differences(recorded.environment, place.environment, (*INFORMATIVE, *may_differ))


def _restore(training: Training, out: Path, stored: Stored | None) -> Snapshot | None:
    """Convert the checkpoint to this training's snapshot; refuses one that does not fit."""
    if stored is None:
        return None
    algorithm, theta, *_ = training.prepared
    if stored.round > training.rounds:
        raise FedpaError(
            f"rounds = {training.rounds}: {str(out)!r} already has {stored.round} rounds"
        )
    try:
        return restore_snapshot(stored, algorithm.init(theta), theta, algorithm.client_init(theta))
    except FedpaError as error:
        raise FedpaError(f"{str(out)!r} can't be resumed: {error}") from None


def _read_finished(training: Training, recorded: Recorded, start: Snapshot | None) -> Fit | None:
    """Read a finished run from its directory; None if files are missing or not as written."""
    summary = recorded.summary or {}
    try:
        theta = fill_tree(training.prepared.theta, read_npz(recorded.out / run_directory.PARAMS))
        history = run_directory.read_metrics(recorded.out)
        digest = run_directory.digest_result(recorded.out, summary)
    except (OSError, ValueError):
        return None
    if len(history) != summary.get("round") or summary.get("digest", digest) != digest:
        return None
    state = start.state if start is not None else None
    return Fit(
        training.prepared.assemble(theta),
        history,
        state,
        summary["stopped"],
        best=summary.get("best"),
        label=training.label,
        out=recorded.out,
        client_states={} if start is None else start.client_states,
    )
