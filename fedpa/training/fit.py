"""`fedpa.fit`: a model and data of one's own, trained by any algorithm."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpa.algorithms.methods import Described
from fedpa.data.federated import FederatedData, from_mapping
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.local import local
from fedpa.errors import FedpaError, check_integer
from fedpa.objectives.objective import Objective, Reduction, SparseTable
from fedpa.training.callbacks import (
    Best,
    Callback,
    Evaluate,
    Event,
    check_callbacks,
    is_lower,
    name_metrics,
)
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.loop import Fit, check_counts, check_share
from fedpa.training.problem import prepare
from fedpa.training.provenance import (
    arrays_fingerprint,
    data_fingerprint,
    describe_program,
    environment,
)
from fedpa.training.run import (
    Place,
    RecordingOptions,
    Training,
    check_recording,
    connect_engine,
    resume_run,
    start_run,
    train_run,
)
from fedpa.training.run_directory import is_run
from fedpa.types import Examples, Loss, Losses, Regularizer

LINES = 10
"""How many lines of progress a run has where there is no terminal."""
_SHOWN = ("train/loss", "eval/", "valid/")


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
    check_integer("eval_every", eval_every, 1)
    check_callbacks(callbacks)
    data = clients if isinstance(clients, FederatedData) else from_mapping(clients)
    if not data.ids:
        raise FedpaError("clients has no clients: at least one is needed")
    objective = Objective(loss, regularizer, reduction, sparse, weight)
    prepared = prepare(objective, params, data, method, rounds)
    own = prepared
    prepared, engine = connect_engine(local() if engine is None else engine, prepared)
    best = Best(best) if isinstance(best, str) else best
    training = Training(
        prepared,
        data,
        engine,
        rounds,
        clients_per_round,
        seed,
        min_success,
        None if evaluate is None else name_metrics(evaluate),
        eval_every,
        callbacks,
        best,
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
        "program": describe_program(method, own),
    }
    if isinstance(method, Described):
        settings |= {"method": method.name, "hyperparameters": method.settings()}
    theta = arrays_fingerprint(prepared.theta)
    made_of = environment(data=data_fingerprint({"clients": data}), params=theta)
    place = Place(Path(out), settings, made_of, recording)

    def record(training: Training) -> Fit:
        """Start in the directory, resume there, or return what is finished."""
        if not overwrite and from_first(lambda: is_run(place.out)):
            return resume_run(training, place, anyway)
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


@contextlib.contextmanager
def show_progress(progress: bool | None) -> Iterator[list[Callback]]:
    """Give the callbacks that show a run's rounds.

    progress: None shows them on a terminal only. Nothing is shown of a run that has no rounds left.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield []
    elif not terminal:
        yield [_print_line]
    else:
        with contextlib.ExitStack() as stack:
            yield [_bar(stack)]


def _print_line(event: Event) -> None:
    t, rounds = event.round, event.rounds
    if t * LINES // rounds > (t - 1) * LINES // rounds:
        print(f"round {t}/{rounds}  {_values(event)}", file=sys.stderr, flush=True)


def _bar(stack: contextlib.ExitStack) -> Callback:
    """A bar from the first round on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    bar = Progress(*columns, console=Console(stderr=True))

    def callback(event: Event) -> None:
        if not bar.tasks:
            stack.enter_context(bar)
            bar.add_task("", total=event.rounds)
        bar.update(bar.tasks[0].id, completed=event.round, description=_values(event))

    return callback


def _values(event: Event) -> str:
    """The round's loss and evaluations, the first few."""
    names = [name for name in event.record if name.startswith(_SHOWN)]
    return "  ".join(f"{name} {event.record[name]:.4g}" for name in names[:4])
