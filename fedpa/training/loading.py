"""`fedpa.load`, `load_checkpoint`, `resume` and `export`: a recorded run and its parameters.

A run's `config.toml` names in `[environment] made_by` the module that assembled it. That module has
`load_model(directory)`, which returns configuration, problem and an untrained model, and `resume`.
A run without one was made by `fedpa.fit`: no file can hold its functions, so they are passed again.
"""

import importlib
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fedpa.algorithms.methods import Method
from fedpa.data.federated import Clients
from fedpa.data.readers.npz import read_npz
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.errors import FedpaError, refuse
from fedpa.objectives.objective import Objective
from fedpa.objectives.prior import Prior
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Evaluate, best_round
from fedpa.training.checkpoint import (
    Stored,
    checkpoint_path,
    list_checkpoints,
    read_checkpoint,
    read_last_checkpoint,
)
from fedpa.training.fit import OWN, follow, resume_fit, spell_method
from fedpa.training.history import History
from fedpa.training.loop import Fit, count_parameters, describe_metrics, list_fields
from fedpa.training.named_arrays import (
    check_format,
    fill_model,
    fill_tree,
    path_name,
    read_arrays,
    to_portable,
    write_arrays,
)
from fedpa.training.problem import Problem
from fedpa.training.run_directory import METRICS, PARAMS, Recorded, read_run
from fedpa.types import Loss, Model

MADE_BY = "made_by"


class Run(NamedTuple):
    """A recorded run, as returned by `fedpa.load`; `print` shows a summary of at most ten lines.

    Args:
        params: The model with its parameters; of a run by `fedpa.fit`, if no model was given to
            fill, the arrays by name.
        config: `RunConfig`; of a run by `fedpa.fit`, the table of its settings.
        metrics: One record per round.
        round: Whose parameters these are.
        problem: The task: its loss, its metric, its data; None of a run by `fedpa.fit`.
        data: Of a run by `fedpa.fit`: the fingerprint of its clients' data (default: None).
    Example:
        >>> print(Run({"w": np.zeros(2)}, {"label": "mine"}, History(), 3, None))
        Run
          params   2 parameters, of round 3
          config   label = 'mine'
          metrics  0 rounds
    """

    params: Model
    config: Any
    metrics: History
    round: int
    problem: Problem | None
    data: str | None = None

    def __repr__(self) -> str:
        """Summarize the run in at most ten lines."""
        table, config = isinstance(self.config, Mapping), self.config
        settings = {k: config.get(k) if table else getattr(config, k, None) for k in _IN_SHORT}
        texts = [f"{k} = {value!r}" for k, value in settings.items() if value is not None]
        fields = {
            "params": f"{count_parameters(self.params)}, of round {self.round}",
            "config": ", ".join(texts),
            "metrics": _count_rounds(self.metrics),
            **describe_metrics(self.metrics),
        }
        return list_fields("Run", fields)


_IN_SHORT = ("task", "label", "method", "rounds", "clients_per_round", "seed")
"""Settings in the summary of a run."""


def _count_rounds(history: History) -> str:
    return f"{len(history)} round{'s' if len(history) != 1 else ''}"


def load(directory: str | Path, which: str | int = "last", params: Model = None) -> Run:
    """Load a run; an unfinished one at its last checkpoint.

    Args:
        directory: The run's directory.
        which: Round of the parameters: "last", "best", or the number of a round that has a
            checkpoint.
        params: For a run of `fedpa.fit`, a model of the same structure, to be filled.
    Returns:
        The model, the configuration and the records.
    Raises:
        FedpaError: The directory contains no run, not this round, or damaged files.
    Example:
        >>> import tempfile, fedpa
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> loss, params = lambda p, z, key: (p["w"] - z) ** 2, {"w": np.zeros(())}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = fedpa.fit(loss, params, {"a": np.ones(8)}, method, rounds=20,
        ...                        clients_per_round=1, out=out, progress=False)
        ...     round(float(load(out).params["w"]), 2)
        1.0
    """
    out = Path(directory)
    recorded = read_run(out)
    t, arrays = read_params(recorded, parse_round("which", which))
    metrics = History()
    if (out / METRICS).is_file():
        metrics = run_directory.read_metrics(out, torn=recorded.summary is None)
    maker = _import_maker(recorded)
    if maker is None:
        model = dict(arrays) if params is None else fill_model(params, arrays, repr(str(out)))
        return Run(model, recorded.settings, metrics, t, None, recorded.environment.get("data"))
    config, problem, model = maker.load_model(out)
    return Run(fill_model(model, arrays, repr(str(out))), config, metrics, t, problem)


class Checkpoint(NamedTuple):
    """A run after one of its rounds, as returned by `fedpa.load_checkpoint`.

    `print` shows a summary of at most ten lines.

    Args:
        round: Rounds done.
        state: The server's state: parameters, the optimizer's moments, averages.
        history: The records of the rounds done. That of a finished run's last round is as it was
            before its callbacks: `fedpa.load` has it whole.
    Example:
        >>> print(Checkpoint(2, {"theta": {"w": np.zeros(2)}}, History()))
        Checkpoint of round 2
          state    theta (2)
          history  0 rounds
    """

    round: int
    state: PyTree
    history: History

    def __repr__(self) -> str:
        """Summarize the checkpoint in at most ten lines."""
        sizes: Counter[str] = Counter()
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.state):
            sizes[path_name(path[:1])] += np.size(leaf)
        parts = [f"{name} ({size:,})" for name, size in sizes.items()]
        more = [f"{len(parts) - _PARTS} more"] if len(parts) > _PARTS else []
        fields = {
            "state": ", ".join([*parts[:_PARTS], *more]),
            "history": _count_rounds(self.history),
            **describe_metrics(self.history),
        }
        return list_fields(f"Checkpoint of round {self.round}", fields)


_PARTS = 5
"""Parts of the state in the summary of a checkpoint."""


def load_checkpoint(
    directory: str | Path, which: str | int = "last", like: PyTree = None
) -> Checkpoint:
    """Read a checkpoint's server state as a pytree.

    Args:
        directory: The run's directory.
        which: Round of the checkpoint: "last", "best" or a number.
        like: A state to be filled, or its shapes: `method(objective).init(params)`; default: nested
            dicts of arrays, by their names in the state.
    Returns:
        The round, the state and the records.
    Raises:
        FedpaError: There is no such checkpoint, it is damaged, or `like` is another state.
    Example:
        >>> import tempfile, fedpa
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.adam(0.1)))
        >>> loss, params = lambda p, z, key: (p["w"] - z) ** 2, {"w": np.zeros(())}
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = fedpa.fit(loss, params, {"a": np.ones(8)}, method, rounds=2,
        ...                        clients_per_round=1, out=out, progress=False)
        ...     list(load_checkpoint(out).state)
        ['theta', 'optimizer', 'average']
    """
    stored = _select_checkpoint(read_run(Path(directory)), parse_round("which", which))
    history = History([*stored.history, *([] if stored.untold is None else [stored.untold])])
    if like is not None:
        like = jax.tree.map(_to_template, like)
        try:
            filled = fill_tree(like, stored.arrays, "state")
        except FedpaError as error:
            path = checkpoint_path(Path(directory), stored.round)
            raise FedpaError(f"checkpoint {str(path)!r}: {error}") from None
        return Checkpoint(stored.round, filled, history)
    state: dict[str, Any] = {}
    for name, array in stored.arrays.items():
        root, *places, last = name.split("/")
        if root != "state":
            continue
        inner = state
        for place in places:
            inner = inner.setdefault(place, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or last in inner:
            raise FedpaError(
                f"{name}: its keys contain /, so the tree can't be rebuilt from names: give like="
            )
        inner[last] = array
    return Checkpoint(stored.round, state, history)


def _to_template(leaf: Any) -> Any:
    """Convert an array to JAX's type; a shape becomes zeros."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def resume(
    directory: str | Path,
    loss: Loss | Objective | None = None,
    params: Model = None,
    clients: Clients | None = None,
    method: Method | None = None,
    *,
    rounds: int | None = None,
    prior: Prior | None = None,
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Callback] = (),
    engine: Engine | OfAlgorithm | None = None,
    force: bool = False,
    progress: bool = True,
) -> Fit:
    """Resume a run from its last checkpoint; the result equals that of an uninterrupted run.

    Settings (clients per round, seed, evaluations, recording) come from `config.toml`. For a run of
    `fedpa.fit`, pass again what no file can hold: `loss`, `params`, `clients`, `method`, and
    `prior`, `evaluate` and `callbacks`, if there were any. For a run of the command, pass none of
    these.

    Args:
        directory: The run's directory. A finished run is returned unchanged.
        loss: As in `fedpa.fit`.
        params: As in `fedpa.fit`: the model before the first round.
        clients: As in `fedpa.fit`.
        method: As in `fedpa.fit`.
        rounds: The total number of rounds, if it changes.
        prior: As in `fedpa.fit`.
        evaluate: As in `fedpa.fit`.
        callbacks: Called after every round.
        engine: As in `fedpa.fit`; default: the engine of the recorded name, with its
            default options.
        force: Resume although versions or data have changed; the result is then not exact.
        progress: Whether to show rounds on stderr: a bar on a terminal, elsewhere ten lines and one
            for each phase while it is compiled.
    Returns:
        The result of the whole run.
    Raises:
        FedpaError: Arguments are missing, or not those of the run.
    Example:
        >>> import tempfile, fedpa
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> own = (lambda p, z, key: (p - z) ** 2, np.zeros(()), {"a": np.ones(8)}, method)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     short = fedpa.fit(*own, rounds=2, clients_per_round=1, out=out, progress=False)
        ...     len(resume(out, *own, rounds=3, progress=False).history)
        3
    """
    out = Path(directory)
    recorded = read_run(out)
    maker = _import_maker(recorded)
    own = dict(zip(OWN, (loss, params, clients, method), strict=True))
    if maker is None:
        missing = [name for name, value in own.items() if value is None]
        if loss is None or clients is None or method is None or missing:
            raise FedpaError(
                f"{str(out)!r} was made by fedpa.fit, and no file can hold its functions: "
                f"fedpa.resume({str(out)!r}, {', '.join(OWN)}) needs {', '.join(missing)}"
            )
        return resume_fit(
            recorded,
            loss,
            params,
            clients,
            method,
            rounds=rounds,
            prior=prior,
            evaluate=evaluate,
            callbacks=callbacks,
            engine=engine,
            force=force,
            progress=progress,
        )
    own |= {"prior": prior, "evaluate": evaluate, "engine": engine}
    given = [name for name, value in own.items() if value is not None]
    if given:
        raise FedpaError(
            f"{given[0]} is given, but {str(out)!r} was made by the command, which has its own: "
            f"leave out {', '.join(given)}"
        )

    def train(more: Sequence[Callback]) -> Fit:
        fit: Fit = maker.resume(out, rounds=rounds, force=force, callbacks=[*callbacks, *more])
        return fit

    label = spell_method(str(recorded.settings.get("method", "")))
    return follow(train, label, progress, out, f"fedpa.resume({str(out)!r})")


def _import_maker(recorded: Recorded) -> ModuleType | None:
    """Import the module that assembled the run; None if it was `fedpa.fit`."""
    name = recorded.environment.get(MADE_BY)
    if name is None:
        return None
    field = f"{recorded.out / run_directory.CONFIG}: {MADE_BY}"
    # A file must not choose any module of this machine to be run.
    if not isinstance(name, str) or not re.fullmatch(r"fedpa(\.\w+)+", name):
        raise refuse(field, name, "must be a module of fedpa, as written")
    try:
        maker = importlib.import_module(name)
    except ImportError as error:
        raise refuse(field, name, f"can't be imported: {error}") from None
    if not hasattr(maker, "load_model"):
        raise refuse(field, name, "loads no runs")
    return maker


def export(
    directory: str | Path,
    path: str | Path,
    which: str | int = "last",
    overwrite: bool = False,
) -> int:
    """Write a run's parameters to a .npz or .safetensors file.

    Args:
        directory: The run's directory.
        path: The file; its suffix selects the format. Arrays are named by their paths in the tree:
            layers/0/weight.
        which: "last", "best" or the number of a round that has a checkpoint.
        overwrite: Replace a file that exists.
    Returns:
        The round of the parameters.
    Raises:
        FedpaError: The file exists, can't be written or has another format; or the run or round
            does not exist.
    Example:
        >>> import tempfile, fedpa
        >>> method = fedpa.fedavg(fedpa.LocalTraining(0.1, 4), fedpa.Server(fedpa.server.sgd(1.0)))
        >>> own = (lambda p, z, key: (p - z) ** 2, np.zeros(()), {"a": np.ones(8)}, method)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     result = fedpa.fit(*own, rounds=2, clients_per_round=1, out=out, progress=False)
        ...     export(out, out + "/model.npz")
        2
    """
    out, path = Path(directory), Path(path)
    check_format("path", path)
    if path.exists() and not overwrite:
        raise refuse("path", str(path), _EXISTS)
    recorded = read_run(out)
    settings, environment = recorded.settings, recorded.environment
    t, arrays = read_params(recorded, parse_round("which", which))
    about = {
        "format": "fedpa",
        "version": environment.get("versions", {}).get("fedpa", "unknown"),
        "task": str(settings.get("task", "")),
        "method": str(settings.get("method", "")),
        "round": str(t),
    }
    run_directory.check_writable(path.parent)
    with run_directory.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, about)
    return t


_EXISTS = "exists: choose another, or give overwrite=True (for the command, --overwrite)"


def read_initial(source: str, which: str = "last") -> dict[str, np.ndarray]:
    """Read the parameters of a warm start: from a run, or from a file."""
    path = Path(source)
    if path.is_file():
        if which != "last":
            raise refuse(
                "init_round", which, f"{source} is a file: it has no rounds to choose from"
            )
        return read_arrays(path)
    if not path.is_dir():
        raise refuse("init", source, "is neither a run's directory nor a file of parameters")
    return read_params(read_run(path), parse_round("init_round", which))[1]


def parse_round(field: str, word: str | int) -> str | int:
    """Parse `last`, `best` or the number of a round, which may be a string."""
    if word in ("last", "best"):
        return word
    if isinstance(word, str) and not word.isdecimal():
        raise refuse(field, word, "must be last, best or the number of a round")
    return int(word)


def read_params(recorded: Recorded, which: str | int = "last") -> tuple[int, dict[str, np.ndarray]]:
    """Read (round, trained arrays by name) of the last, the best or a numbered round.

    For an unfinished run the last round is that of its last checkpoint.
    """
    out, summary = recorded.out, recorded.summary
    if which == "last" and summary is not None and (out / PARAMS).is_file():
        try:
            return summary["round"], read_npz(out / PARAMS)
        except FedpaError as error:
            warnings.warn(f"{error}; the last checkpoint is used", stacklevel=2)
    stored = _select_checkpoint(recorded, which)
    return stored.round, {
        name.removeprefix("params/"): to_portable(array)
        for name, array in stored.arrays.items()
        if name.startswith("params/")
    }


def _select_checkpoint(recorded: Recorded, which: str | int) -> Stored:
    """Read the checkpoint of the last, the best or a numbered round."""
    out = recorded.out
    if which == "last":
        stored = read_last_checkpoint(out)
    else:
        wanted = _find_best(recorded) if which == "best" else int(which)
        stored = read_checkpoint(out, wanted) if wanted in list_checkpoints(out) else None
    if stored is None:
        available = list_checkpoints(out)
        have = f"available: {', '.join(map(str, available))}" if available else "it has none"
        name = f"the {which} round" if isinstance(which, str) else f"round {which}"
        raise FedpaError(f"{str(out)!r} has no checkpoint of {name}: {have}")
    return stored


def _find_best(recorded: Recorded) -> int | None:
    if recorded.summary is not None:
        return (recorded.summary.get("best") or {}).get("round")
    stored = read_last_checkpoint(recorded.out)
    return None if stored is None else best_round(stored.memory)
