"""`fedpa.fit`: a model and data of one's own, trained by any algorithm."""

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, stage
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.methods import about, of_population
from fedpa.data.federated import FederatedData, check_when_read, from_mapping
from fedpa.engines.distributed import from_first, is_first
from fedpa.engines.engine import OfAlgorithm
from fedpa.engines.local import local
from fedpa.errors import FedpaError, refuse
from fedpa.objectives.checks import check_loss
from fedpa.objectives.client_data import find_bad_value, is_real
from fedpa.objectives.objective import Objective, Reduction
from fedpa.objectives.sparse_table import SparseTable
from fedpa.server.update import Server
from fedpa.training import checkpoints
from fedpa.training.callbacks import Callback, Event
from fedpa.training.conducting import Place, Training, conduct
from fedpa.training.directories import go_on, new_directory
from fedpa.training.evaluation import Evaluate, at_rounds, evaluated, is_due
from fedpa.training.loop import Fit, check_callbacks, check_counts, check_share
from fedpa.training.problem import Problem
from fedpa.training.progress import show_progress
from fedpa.training.provenance import (
    arrays_fingerprint,
    data_fingerprint,
    environment,
    program_fingerprint,
)
from fedpa.training.recording import Made, begin
from fedpa.training.recording_options import RecordingOptions, check_recording
from fedpa.training.run_directory import is_run
from fedpa.training.stopping import Best, is_lower, remember_best
from fedpa.types import Examples, Key, Loss, Losses, Params, Regularizer


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
    min_success: the share of a round's clients that must succeed for the run to go on.
    out: the run's directory. A run of the same settings that lies there is gone on with from its
        last checkpoint; one that is finished is given back as it is; more `rounds` extend it,
        unless a callback ended it.
    overwrite: start anew, whatever lies there.
    anyway: go on although versions or data are not what they were.
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
    algorithm, theta, assemble = prepared(
        loss, params, data, method, rounds, regularizer, reduction, sparse, weight
    )
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
        return _followed(training, progress, None, lambda training: conduct(training, None))
    check_recording(recording)
    settings = {
        "rounds": int(rounds),
        "clients_per_round": int(clients_per_round),
        "seed": int(seed),
        "min_success": float(min_success),
        "eval_every": int(eval_every),
        "engine": _called(engine),
        "best": {} if best is None else {"metric": best.metric, "lower": is_lower(best)},
        "recording": {k: v for k, v in dataclasses.asdict(recording).items() if v is not None},
    }
    known = about(method)
    if known is not None:
        settings |= {"method": known.name, "hyperparameters": known.settings()}
    made = Made(
        settings | {"program": program_fingerprint(algorithm, theta, data)},
        environment(data=data_fingerprint({"clients": data}), params=arrays_fingerprint(theta)),
    )
    place = Path(out)
    return _followed(
        training,
        progress,
        place,
        lambda training: _recorded(training, place, made, recording, overwrite, anyway),
    )


def _followed(
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
                done = max(checkpoints.entries(out), default=0)
                resumes = f"the same call, with out={str(out)!r}, resumes it"
        raise KeyboardInterrupt(f"after round {done} of {training.rounds}: {resumes}")


def _recorded(
    training: Training,
    out: Path,
    made: Made,
    options: RecordingOptions,
    overwrite: bool,
    anyway: bool,
) -> Fit:
    """Train in a directory: begin there, go on, or give back what is finished."""
    if from_first(lambda: is_run(out)) and not overwrite:
        return go_on(training, out, made, options, {}, anyway)
    with contextlib.ExitStack() as stack:
        if is_first():
            stack.enter_context(new_directory(out, overwrite))
            begin(out, made, None)
        return conduct(training, Place(out, made, options, None, {}))


def _called(engine: Any) -> str:
    """An engine's name, as commands have it: local, per-client."""
    name = getattr(engine, "__qualname__", type(engine).__name__)
    return str(name).split(".<locals>")[0].replace("_", "-")


def prepared(
    loss: Loss,
    params: Any,
    data: FederatedData,
    method: Any,
    rounds: int,
    regularizer: Regularizer | None,
    reduction: Reduction,
    sparse: SparseTable | None,
    weight: Callable[[Examples], Losses] | None,
) -> tuple[Algorithm, Params, Callable[[Params], Any]]:
    """The algorithm for this loss, its θ, and θ → params; what does not fit together is refused."""
    problem, theta, assemble = bind(loss, params, regularizer, reduction, sparse, weight)
    problem = problem._replace(like=some_examples(data))
    check_loss(problem, theta, problem.like)
    algorithm = None
    if callable(method):
        _check_called(method, problem)
        algorithm = of_population(method, map(data.num_examples, data.ids))(problem)
    if isinstance(method, LocalTraining | Server):
        kind = type(method).__name__
        raise refuse(
            "method", method, f"must be an algorithm: fedpa.fedavg(local, server) takes a {kind}"
        )
    if not isinstance(algorithm, Algorithm):
        raise refuse("method", method, "must be an algorithm, as fedpa.fedavg(local, server) gives")
    _warn_of_no_sampling(algorithm, rounds)
    return algorithm, theta, assemble


def _check_called(method: Any, problem: Objective) -> None:
    """Refuse a function that makes methods and was not called: fedpa.fedavg."""
    name = getattr(method, "__qualname__", "")
    ours = getattr(method, "__module__", "").startswith("fedpa.algorithms")
    try:
        signature = inspect.signature(method)
        if not (ours and name.isidentifier()):  # a method that it makes is local to it
            signature.bind(problem)
            return
    except ValueError:  # what is not written in Python does not tell
        return
    except TypeError:
        pass
    needed = [
        f"{field}=…" if parameter.kind is parameter.KEYWORD_ONLY else field
        for field, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
    ]
    call = f"{'fedpa.' if ours else ''}{name}({', '.join(needed)})"
    raise FedpaError(f"method = {name}: must be called with its settings, {call}")


def prepared_task(
    problem: Problem, params: Any, clients: FederatedData, method: Any, rounds: int
) -> tuple[Algorithm, Params, Callable[[Params], Any]]:
    """The same for a task, with parameters and clients that may be others than its own."""
    return prepared(
        problem.loss,
        params,
        clients,
        method,
        rounds,
        problem.regularizer,
        problem.reduction,
        problem.sparse,
        problem.weight,
    )


def some_examples(data: FederatedData) -> Any:
    """Those of the first client that has any."""
    some = next((name for name in data.ids if data.num_examples(name) > 0), data.ids[0])
    return check_when_read(data).examples(some)


def bind(
    loss: Loss,
    params: Any,
    regularizer: Regularizer | None,
    reduction: Reduction,
    sparse: SparseTable | None = None,
    weight: Callable[[Examples], Losses] | None = None,
) -> tuple[Objective, Params, Callable[[Params], Any]]:
    """Split `params` into its floating-point arrays θ and the rest: (objective, θ, θ → params)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        _check_parameter(jax.tree_util.keystr(path) or "array", leaf)
    params = jax.tree.map(_moved, params)
    theta, rest = eqx.partition(params, eqx.is_inexact_array)
    if not jax.tree.leaves(theta):
        raise FedpaError("params has no floating-point arrays: there is nothing to train")

    def assemble(theta: Params) -> Any:
        return eqx.combine(theta, rest)

    def bound_loss(theta: Params, batch: Examples, key: Key) -> Any:  # checked by check_loss
        return loss(assemble(theta), batch, key)

    penalty = None if regularizer is None else (lambda theta: regularizer(assemble(theta)))
    if sparse is not None:
        of_rows = sparse.loss
        sparse = sparse._replace(
            loss=lambda theta, batch, key: of_rows(assemble(theta), batch, key)
        )
    return Objective(bound_loss, penalty, reduction, sparse, weight), theta, assemble


def _warn_of_no_sampling(algorithm: Algorithm, rounds: int) -> None:
    if SAMPLING in algorithm.clients and stage(algorithm.phase(rounds - 1)) == BURN_IN:
        warnings.warn(
            f"all {rounds} rounds are burn-in: nothing is sampled, and this is FedAvg; "
            "lower burn_in_rounds or raise rounds",
            stacklevel=3,
        )


def _check_parameter(where: str, leaf: Any) -> None:
    """Refuse complex numbers, and numbers that are not finite or that JAX would change."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        return
    if jnp.issubdtype(leaf.dtype, jnp.inexact) and not is_real(leaf.dtype):
        raise FedpaError(
            f"params: {where} is of type {leaf.dtype}: must be real numbers of at most 64 bits"
        )
    if is_real(leaf.dtype):
        array = np.asarray(leaf)  # on the host: nothing to compile
        bad = find_bad_value(array)
        if bad is not None:
            index, expected = bad
            place = f"{where}{index}" if index else where
            raise FedpaError(f"params: {place} = {array[tuple(index)]}: {expected}")


def _moved(leaf: Any) -> Any:
    """NumPy's numbers on the device, a copy; any other leaf as it is."""
    if not isinstance(leaf, np.ndarray) or not is_real(leaf.dtype) or leaf.dtype == bool:
        return leaf
    # `jnp.asarray` would compile a program for every shape. JAX has no arrays of the other byte
    # order.
    return jax.device_put(np.array(leaf, leaf.dtype.newbyteorder("=")))
