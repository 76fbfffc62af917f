"""`fedpa.fit`: a model and data of one's own, trained by any algorithm."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpa.algorithms.methods import Described
from fedpa.data.federated import FederatedData, from_mapping
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import OfAlgorithm
from fedpa.engines.local import local
from fedpa.errors import FedpaError, refuse
from fedpa.objectives.objective import Objective, Reduction
from fedpa.objectives.sparse_table import SparseTable
from fedpa.training.callbacks import Callback, Event, check_callbacks
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.evaluation import Evaluate, at_rounds, evaluated, is_due
from fedpa.training.loop import Fit, check_counts, check_share
from fedpa.training.problem import prepare
from fedpa.training.progress import show_progress
from fedpa.training.provenance import (
    arrays_fingerprint,
    data_fingerprint,
    environment,
    program_fingerprint,
)
from fedpa.training.recording import RecordingOptions, check_recording
from fedpa.training.run import Place, Training, resume_run, start_run, train_run
from fedpa.training.run_directory import Made, check_free, is_run
from fedpa.training.stopping import Best, is_lower, remember_best
from fedpa.types import Examples, Loss, Losses, Regularizer


def fit(
    loss: Loss,
    params: Any,
    clients: Any,
    method: Any,
    *,
    rounds: Any,
    clients_per_round: Any,
    seed: Any = 0,
    regularizer: Regularizer | None = None,
    reduction: Reduction = "mean",
    sparse: SparseTable | None = None,
    weight: Callable[[Examples], Losses] | None = None,
    evaluate: Evaluate | None = None,
    eval_every: Any = 1,
    callbacks: Sequence[Callback] = (),
    engine: Any = None,
    min_success: Any = 0.0,
    out: str | Path | None = None,
    overwrite: bool = False,
    anyway: bool = False,
    best: Best | str | None = None,
    recording: RecordingOptions = RecordingOptions(),
    progress: bool | None = None,
) -> Fit:
    """Train `params` on the clients' data.

    loss: `loss(params, batch, key)`, one number per example of the batch. For a loss of the whole
        batch see `fedpa.per_example`.
    params: any pytree: an equinox module, flax parameters, a dict of arrays. Floating-point arrays
        are trained; every other leaf stays as it is.
    clients: a mapping of client id to a pytree of arrays (first axis = examples), checked before
        anything runs; or a lazy `FederatedData`, whose clients are checked as they are read.
    method: an algorithm with its settings, e.g. `fedpa.fedpa(local, server, rho=0.1)`.
    regularizer: a function of the parameters, added once to each mini-batch's loss.
    sparse: for a model with a large table of which a batch reads few rows (an embedding): how to
        leave the others alone, as in `fedpa.experiments.models.bag_of_words.SPARSE`.
    weight: a function of a batch that says how much each example counts in a mean (1 if not given).
    evaluate: a function of the parameters that returns metrics by name, logged as `eval/<name>`.
    engine: where clients run, e.g. `fedpa.engines.vectorized()`; `fedpa.engines.local()` chooses.
    min_success: the share of a round's clients that must succeed for the run to continue.
    out: the run's directory. If it already contains a run of the same settings, that is resumed
        from its last checkpoint; a finished one is returned as it is; more `rounds` extend it,
        unless a callback ended it.
    overwrite: start again, whatever run the directory contains.
    anyway: resume although versions or data are not what they were.
    best: the metric whose best round keeps its checkpoint: "eval/accuracy".
    recording: how often checkpoints are written, how many are kept, further loggers.
    progress: show the rounds on stderr: a bar on a terminal, else ten lines. Default: on a terminal
        only.

    Ctrl-C, with `out`, keeps the rounds done: the same call resumes the run.
    """
    check_counts(rounds, clients_per_round, seed)
    check_share("min_success", min_success)
    check_callbacks(callbacks)
    data = clients if isinstance(clients, FederatedData) else from_mapping(clients)
    if not data.ids:
        raise FedpaError("clients has no clients: at least one is needed")
    objective = Objective(loss, regularizer, reduction, sparse, weight)
    algorithm, theta, assemble = prepare(objective, params, data, method, rounds)
    engine = local() if engine is None else engine
    run_by = algorithm
    if isinstance(engine, OfAlgorithm):
        run_by, engine = engine.make(algorithm, theta)
    if not callable(engine):
        raise refuse("engine", engine, "must be an engine, for example fedpa.engines.local()")
    evaluations = []
    if evaluate is not None:
        evaluations = [at_rounds(lambda model: evaluated(evaluate, model), eval_every)]
    if isinstance(best, str):
        best = Best(best)
    remembering = None if best is None else remember_best(best)

    def at_end(model: Any, record: Mapping[str, Any]) -> dict[str, Any]:
        """Evaluate a round that turned out to be the last when a callback ended the run."""
        if evaluate is None or is_due(record["round"], rounds, eval_every):
            return {}
        return evaluated(evaluate, model)

    training = Training(
        run_by,
        theta,
        data,
        assemble,
        rounds,
        clients_per_round,
        seed,
        engine,
        min_success,
        [*evaluations, *callbacks, *([] if remembering is None else [remembering])],
        remembering,
        at_end,
    )
    if out is None:
        return _follow(training, progress, None, lambda training: train_run(training, None))
    check_recording(recording)
    settings = {
        "rounds": int(rounds),
        "clients_per_round": int(clients_per_round),
        "seed": int(seed),
        "min_success": float(min_success),
        "eval_every": int(eval_every),
        "engine": _name_engine(engine),
        "best": {} if best is None else {"metric": best.metric, "lower": is_lower(best)},
        "recording": {k: v for k, v in dataclasses.asdict(recording).items() if v is not None},
    }
    if isinstance(method, Described):
        settings |= {"method": method.name, "hyperparameters": method.settings()}
    made = Made(
        settings | {"program": program_fingerprint(algorithm, theta, data)},
        environment(data=data_fingerprint({"clients": data}), params=arrays_fingerprint(theta)),
    )
    place = Place(Path(out), made, recording)

    def record(training: Training) -> Fit:
        """Start in the directory, resume there, or return what is finished."""
        if not overwrite and from_first(lambda: is_run(place.out)):
            return resume_run(training, place, anyway)
        if is_first():
            check_free(place.out, overwrite)
        return start_run(training, place, overwrite)

    return _follow(training, progress, place.out, record)


def _follow(
    training: Training,
    progress: bool | None,
    out: Path | None,
    train: Callable[[Training], Fit],
) -> Fit:
    """Train with the progress shown; Ctrl-C ends it in a few lines."""
    done = 0

    def count(event: Event) -> None:
        nonlocal done
        done = event.round

    with show_progress(progress if is_first() else False) as shown:
        try:
            return train(training._replace(callbacks=[*training.callbacks, *shown, count]))
        except KeyboardInterrupt:  # what is done is saved by now
            resumes = "nothing is kept without out=DIR"
            if out is not None:
                done = max(list_checkpoints(out), default=0)
                resumes = f"the same call, with out={str(out)!r}, resumes it"
        raise KeyboardInterrupt(f"after round {done} of {training.rounds}: {resumes}")


def _name_engine(engine: Any) -> str:
    """An engine's name, as commands have it: local, per-client."""
    name = getattr(engine, "__qualname__", type(engine).__name__)
    return str(name).split(".<locals>")[0].replace("_", "-")
