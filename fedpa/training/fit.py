"""`fedpa.fit`: train the user's model on the user's data by any method; record and resume."""

import contextlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedpa.algorithms.methods import Described, Method
from fedpa.data.federated import Clients, as_federation
from fedpa.engines import ENGINES, EngineOptions
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import Engine, OfAlgorithm, num_bytes
from fedpa.engines.local import local
from fedpa.errors import (
    FedpaError,
    check_integer,
    check_takes,
    check_type,
    convert_value,
    refuse,
)
from fedpa.objectives.objective import Objective
from fedpa.objectives.prior import Prior
from fedpa.training.callbacks import (
    Best,
    Callback,
    Evaluate,
    Event,
    Watching,
    check_callbacks,
    is_lower,
    name_metrics,
)
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.loop import Fit, check_counts, check_share
from fedpa.training.options import StorageOptions
from fedpa.training.problem import Prepared, prepare
from fedpa.training.provenance import (
    arrays_fingerprint,
    data_fingerprint,
    describe_prior,
    describe_program,
    environment,
)
from fedpa.training.run import (
    Place,
    RecordingOptions,
    Remedies,
    Training,
    check_storage,
    connect_engine,
    resume_run,
    start_run,
    train_run,
)
from fedpa.training.run_directory import CONFIG, Recorded, is_run
from fedpa.types import Loss, Model

OWN = ("loss", "params", "clients", "method")
"""The arguments of `fit` that no file can hold."""
REMEDIES = Remedies(
    "recording=fedpa.RecordingOptions(force=True) or fedpa.resume(…, force=True)",
    "recording=fedpa.RecordingOptions(overwrite=True)",
)
LINES = 10
"""Number of progress lines without a terminal."""
NAMES = {
    "ep": "EP",
    "fedavg": "FedAvg",
    "fedexp": "FedExP",
    "fedpa": "FedPA",
    "fedprox": "FedProx",
    "mb-sgd": "MB-SGD",
    "mime": "MIME",
    "mime-lite": "MimeLite",
    "pvi": "PVI",
    "scaffold": "SCAFFOLD",
    "sep": "SEP",
}
"""Names of methods as in papers."""
_SHOWN = ("train/loss", "train/mean_change", "eval/", "valid/")
_SETTINGS = {
    "rounds": int,
    "clients_per_round": int,
    "seed": int,
    "min_success": float,
    "eval_every": int,
}
"""Settings that `resume` reads from `config.toml`, besides tables."""
_STORAGE = typing.get_type_hints(StorageOptions)


def fit(
    loss: Loss | Objective,
    params: Model,
    clients: Clients,
    method: Method,
    *,
    rounds: int,
    clients_per_round: int,
    seed: int = 0,
    prior: Prior | None = None,
    evaluate: Evaluate | None = None,
    eval_every: int = 1,
    callbacks: Sequence[Callback] = (),
    engine: Engine | OfAlgorithm | None = None,
    min_success: float = 0.0,
    out: str | Path | None = None,
    recording: RecordingOptions = RecordingOptions(),
    progress: bool = True,
) -> Fit:
    """Train a model on the clients' data.

    Ctrl-C raises `KeyboardInterrupt` with one line on how to resume; with `out`, finished rounds
    are kept.

    Args:
        loss: `loss(params, batch, key)`, one number per example of the batch (`fedpa.per_example`
            converts a loss of a whole batch); or `fedpa.Objective(loss, prior=…, regularizer=…,
            reduction=…, sparse=…, weight=…)`.
        params: Any pytree: an equinox module, flax parameters, a dict of arrays. Floating-point
            arrays are trained; other leaves are not changed.
        clients: Client id → a pytree of arrays whose first axis counts examples, checked before
            anything runs; or a `FederatedData`, whose clients are checked as they are read.
        method: An algorithm with its settings: `fedpa.fedpa(local, server, rho=0.1)`.
        rounds: The total number of rounds, ≥ 1.
        clients_per_round: Clients drawn for each round without replacement, ≥ 1; by `fedpa.private`
            with Poisson sampling, on average.
        seed: Determines cohorts and randomness, 0 to 2³² − 1; the same seed gives the same result,
            bit for bit.
        prior: p(θ) of the global posterior, e.g. `fedpa.normal_prior(sd=2.0)`: counted once, as
            −log p(θ)/n in the mean loss, n the examples of all clients; default: the objective's.
        evaluate: A function of the model that returns metrics by name, recorded as `eval/<name>`.
        eval_every: Rounds between evaluations, ≥ 1; the last round is always evaluated.
        callbacks: Called after every round; may return metrics or `fedpa.Stop("reason")`.
        engine: Where clients run, e.g. `fedpa.engines.vectorized()`; default:
            `fedpa.engines.local()`, which chooses.
        min_success: Share of a round's clients, 0 to 1, that must succeed for the run to continue.
        out: The run's directory; default: nothing is recorded. If it contains a run with the same
            settings, that run is resumed from its last checkpoint, or returned if it is finished.
            More `rounds` extend it, unless a callback ended it.
        recording: The run's label, the metric whose best round is kept, checkpoints, loggers,
            whether to overwrite a run.
        progress: Whether to show rounds on stderr: a bar on a terminal, elsewhere ten lines and one
            for each phase while it is compiled. A finished run is reported in one line.
    Returns:
        The trained model, one record per round, and the server's state; `print` shows a summary.
    Raises:
        FedpaError: Arguments don't fit together, the directory contains another run, data can't be
            used, or too few clients succeed.
    Example:
        >>> import fedpa
        >>> clients = {"a": {"x": np.ones(8)}, "b": {"x": np.zeros(8)}}
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.2, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> result = fit(lambda p, batch, key: (p - batch["x"]) ** 2, np.zeros(()), clients, method,
        ...              rounds=20, clients_per_round=2, progress=False)
        >>> round(float(result.params), 2)
        0.5
    """
    check_counts(rounds, clients_per_round, seed)
    check_share("min_success", min_success)
    check_integer("eval_every", eval_every, 1)
    check_callbacks(callbacks)
    if evaluate is not None:
        check_takes("evaluate", evaluate, "(params)")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise refuse("out", out, 'must be a directory: "runs/mine"')
    _check_recording(recording)
    data = as_federation(clients)
    best = Best(recording.best) if isinstance(recording.best, str) else recording.best
    label = recording.label or label_method(method)

    def run(more: Sequence[Callback]) -> Fit:
        """Start, resume, or return the finished run in the directory."""
        own = prepare(_make_objective(loss, prior), params, data, method, rounds)
        _check_watched(own, evaluate)
        prepared, connected = connect_engine(local() if engine is None else engine, own)
        training = Training(
            prepared,
            data,
            connected,
            rounds,
            clients_per_round,
            seed,
            min_success,
            None if evaluate is None else name_metrics(evaluate),
            eval_every,
            [*callbacks, *more],
            best,
            label=label,
        )
        if out is None:
            return train_run(training, None)
        settings = {
            "rounds": int(rounds),
            "clients_per_round": int(clients_per_round),
            "seed": int(seed),
            "min_success": float(min_success),
            "evaluate": evaluate is not None,
            "eval_every": int(eval_every),
            "engine": _name_engine(connected),
            "program": describe_program(method, own),
            **describe_prior(own, data),
            **_describe_method(method, recording),
            "best": {} if best is None else {"metric": best.metric, "lower": is_lower(best)},
            "recording": {
                field: value
                for field in _STORAGE
                if (value := getattr(recording, field)) is not None
            },
            "model": {
                "parameters": sum(leaf.size for leaf in jax.tree.leaves(own.theta)),
                "bytes": num_bytes(own.theta),
            },
            "federation": {
                "clients": len(data.ids),
                "examples": sum(map(data.num_examples, data.ids)),
            },
        }
        about = {k: v for k, v in settings.items() if k in ("label", "method", "seed")}
        theta = arrays_fingerprint(prepared.theta)
        made_of = environment(data=data_fingerprint({"clients": data}), params=theta)
        place = Place(Path(out), settings, made_of, recording, about, remedies=REMEDIES)
        if not recording.overwrite and from_first(lambda: is_run(place.out)):
            return resume_run(training, place, recording.force)
        return start_run(training, place, recording.overwrite)

    functions = {
        "prior": prior,
        "evaluate": evaluate,
        "callbacks": callbacks or None,
        "engine": engine,
    }
    again = [f"{name}={name}" for name, value in functions.items() if value is not None]
    call = f"fedpa.resume({str(out)!r}, {', '.join([*OWN, *again])})"
    return follow(run, label, progress, None if out is None else Path(out), call)


def _check_watched(prepared: Prepared, evaluate: Any) -> None:
    """Refuse a switch at the plateau of a metric that nothing measures."""
    switch = prepared.algorithm.switch
    if switch is not None and evaluate is None and not switch.rule.metric.startswith("train/"):
        raise refuse("metric", switch.rule.metric, "nothing evaluates it: give evaluate")


def _make_objective(loss: Any, prior: Any) -> Objective:  # checked by check_loss
    objective = loss if isinstance(loss, Objective) else Objective(loss)
    if prior is None:
        return objective
    if objective.prior is not None:
        raise refuse("prior", prior, "the objective has a prior, too: give one of them")
    return objective._replace(prior=prior)


def _check_recording(recording: RecordingOptions) -> None:
    check_type("recording", recording, RecordingOptions, 'RecordingOptions(label="mine")')
    check_storage(recording)
    label, best = recording.label, recording.best
    if label is not None and (not isinstance(label, str) or not label.strip() or "\n" in label):
        raise refuse("label", label, "must be a string of one line")
    if best is not None and not isinstance(best, str | Best):
        raise refuse("best", best, 'must be a metric: "eval/accuracy", or fedpa.Best("eval/cost")')


def _name_engine(engine: Engine) -> str:
    """Name an engine as commands do: local, per-client."""
    name = getattr(engine, "__qualname__", type(engine).__name__)
    return str(name).split(".<locals>")[0].replace("_", "-")


def _describe_method(method: Method, recording: RecordingOptions) -> dict[str, Any]:
    """Describe the method for `config.toml`: label, and name and settings if it has them."""
    if not isinstance(method, Described):
        return {} if recording.label is None else {"label": recording.label}
    return {
        "label": recording.label or label_method(method),
        "method": method.name,
        "hyperparameters": method.settings(),
    }


def label_method(method: Method) -> str:
    """Label a method by its name and required settings, "FedPA, ρ = 0.1"; a function by its name.

    Example:
        >>> import fedpa
        >>> local, server = fedpa.LocalTraining(0.1, 10), fedpa.Server(fedpa.server.sgd(1.0))
        >>> label_method(fedpa.fedprox(local, server, proximal=0.01))
        'FedProx, proximal = 0.01'
    """
    if not isinstance(method, Described):
        name = str(getattr(method, "__qualname__", "")).split(".<locals>")[0]
        return name if name.isidentifier() else "your own method"
    label = spell_method(method.name)
    wrapped = method.arguments.get("method")
    if isinstance(wrapped, Described):
        label = f"{label} {label_method(wrapped)}"
    for name, parameter in inspect.signature(method.builder).parameters.items():
        value = method.arguments.get(name)
        is_setting = isinstance(value, int | float | str | np.generic)
        if is_setting and (parameter.default is parameter.empty or name == "rho"):
            text = value if isinstance(value, str) else f"{value:g}"
            label += f", {'ρ' if name == 'rho' else name} = {text}"
        elif name in ("sampler", "delta") and value is not None:
            label += f", own {name}"
    return label


def spell_method(name: str) -> str:
    """Name a method as papers do: FedPA for fedpa, mean control for mean-control."""
    return NAMES.get(name, name.replace("-", " "))


# Resuming: settings from the directory, functions and data from the caller.


def resume_fit(
    recorded: Recorded,
    loss: Loss | Objective,
    params: Model,
    clients: Clients,
    method: Method,
    *,
    rounds: int | None,
    prior: Prior | None,
    evaluate: Evaluate | None,
    callbacks: Sequence[Callback],
    engine: Engine | OfAlgorithm | None,
    force: bool,
    progress: bool,
) -> Fit:
    """Resume a run of `fit`; arguments as in `fedpa.resume`."""
    settings, config = recorded.settings, recorded.out / CONFIG
    for name in (*_SETTINGS, "engine"):
        if name not in settings:
            raise FedpaError(f"{config}: {name} is missing: fedpa.fit(…, out=…) did not write this")
    found = {
        name: convert_value(kind, settings[name], f"{config}: {name}")
        for name, kind in _SETTINGS.items()
    }
    if settings.get("evaluate") and evaluate is None and recorded.summary is None:
        raise FedpaError(
            f"evaluate is missing: {str(recorded.out)!r} has evaluations of its rounds, which "
            "fedpa.resume(…, evaluate=…) continues"
        )
    name = settings["engine"]
    if engine is None and name not in ENGINES:
        raise refuse("engine", name, "is not an engine of fedpa: pass engine= to resume")
    return fit(
        loss,
        params,
        clients,
        method,
        **found | ({} if rounds is None else {"rounds": rounds}),
        prior=prior,
        evaluate=evaluate,
        callbacks=callbacks,
        engine=ENGINES[name](EngineOptions()) if engine is None else engine,
        out=recorded.out,
        recording=_read_recording(recorded, force),
        progress=progress,
    )


def _read_recording(recorded: Recorded, force: bool) -> RecordingOptions:
    """Read label, best metric and recording options from `config.toml`."""
    settings, config = recorded.settings, recorded.out / CONFIG

    def read(table: str, hints: Mapping[str, Any]) -> dict[str, Any]:
        values = settings.get(table, {})
        if not isinstance(values, dict) or not set(values) <= set(hints):
            raise refuse(f"{config}: {table}", values, f"must be a table of {', '.join(hints)}")
        return {
            name: convert_value(hints[name], value, f"{config}: {table}.{name}")
            for name, value in values.items()
        }

    best = read("best", {"metric": str, "lower": bool})
    return RecordingOptions(
        **read("recording", _STORAGE),
        label=convert_value(str | None, settings.get("label"), f"{config}: label"),
        best=Best(**best) if best else None,
        force=force,
    )


# Progress, and Ctrl-C.


def follow(
    train: Callable[[Sequence[Callback]], Fit],
    label: str,
    progress: bool,
    out: Path | None = None,
    call: str = "",
) -> Fit:
    """Train and show progress; Ctrl-C ends it with a few lines.

    Args:
        train: Trains with these additional callbacks.
        label: The run's label.
        progress: Whether to show its rounds.
        out: The run's directory; None if it is not recorded.
        call: The call that resumes it.
    """
    done, rounds = 0, 0

    def count(event: Event) -> None:
        nonlocal done, rounds
        done, rounds = event.round, event.rounds

    progress = progress and is_first() and sys.stderr is not None
    with show_progress(progress, label) as shown:
        try:
            fit = train([*shown, count])
            if progress and not rounds:
                told = f"finished after round {len(fit.history)}, returned from {str(out)!r}"
                print(f"{label}  {told}", file=sys.stderr, flush=True)
            return fit
        except KeyboardInterrupt:  # finished rounds are saved by now
            if out is not None:
                done = max(list_checkpoints(out), default=0)
    # Raised outside of the block, without the traceback of interrupted frames.
    after = f"after round {done}" + (f" of {rounds}" if rounds else "")
    where = after if done else "before the end of the first round"
    kept = "nothing is kept without out=DIR"
    if out is not None:
        kept = f"{call} resumes it" if is_run(out) else "nothing was written yet"
    raise KeyboardInterrupt(f"{where}: {kept}")


@contextlib.contextmanager
def show_progress(progress: bool, label: str) -> Iterator[list[Callback]]:
    """Yield the callbacks that show a run's rounds: a bar on a terminal, elsewhere lines."""
    if not progress:
        yield []
    elif not sys.stderr.isatty():
        yield [_print_lines(label)]
    else:
        with contextlib.ExitStack() as stack:
            yield [_draw_bar(stack, label)]


def _print_lines(label: str) -> Callback:
    """Print ten lines, and one before the first round of each phase."""

    def write(t: int, rounds: int, *words: str) -> None:
        print("  ".join([label, f"round {t}/{rounds}", *words]), file=sys.stderr, flush=True)

    def callback(event: Event) -> None:
        t, rounds = event.round, event.rounds
        if t * LINES // rounds > (t - 1) * LINES // rounds:
            write(t, rounds, *_list_values(event))

    return Watching(callback, lambda t, rounds, phase: write(t, rounds, _announce_phase(phase)))


def _announce_phase(phase: str) -> str:
    return f"compiling the {phase} program"


def _draw_bar(stack: contextlib.ExitStack, label: str) -> Callback:
    """Show a bar from the start of the first round on."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    bar: Progress | None = None

    def draw(done: int, rounds: int, text: str) -> None:
        nonlocal bar
        if bar is None:
            texts = ("{task.fields[label]}", "{task.description}")
            name, values = (TextColumn(text, markup=False) for text in texts)
            # If room is short, the count is shortened last.
            width = Column(no_wrap=True, min_width=len(f"{rounds}/{rounds}"))
            columns = (name, BarColumn(), MofNCompleteColumn(table_column=width))
            bar = Progress(*columns, TimeRemainingColumn(), values, console=Console(stderr=True))
            bar.add_task("", total=rounds, completed=done, label=label)
            stack.enter_context(bar)
        bar.update(bar.tasks[0].id, completed=done, description=text)

    def callback(event: Event) -> None:
        draw(event.round, event.rounds, "  ".join(_list_values(event)))

    return Watching(callback, lambda t, rounds, phase: draw(t - 1, rounds, _announce_phase(phase)))


def _list_values(event: Event) -> list[str]:
    """Format the round's loss and its first few evaluations."""
    names = [name for name in event.record if name.startswith(_SHOWN)]
    return [f"{name} {event.record[name]:.4g}" for name in names[:4]]
