"""The runs of `fedpa.compare`: the user's model, trained and recorded as by `fedpa.fit`."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, TypeGuard, final

import jax
import numpy as np

from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.methods import Described, Method
from fedpa.algorithms.plateau import Plateau
from fedpa.algorithms.switch import AUTO
from fedpa.engines.engine import Engine
from fedpa.errors import FedpaError, refuse
from fedpa.experiments.comparison.comparison import Run, Settings
from fedpa.experiments.comparison.splits import Splits
from fedpa.metrics.streaming import PERCENTILES
from fedpa.objectives.objective import Objective
from fedpa.training import run_directory
from fedpa.training.callbacks import Best, Callback, Evaluate, is_lower
from fedpa.training.loop import Fit
from fedpa.training.problem import Prepared, bind, complete, prepare
from fedpa.training.provenance import (
    arrays_fingerprint,
    data_fingerprint,
    describe_prior,
    describe_program,
    differences,
    environment,
    probe_objective,
)
from fedpa.training.run import (
    NOT_COMPARED,
    Place,
    RecordingOptions,
    Training,
    connect_engine,
    resume_run,
    start_run,
)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all runs have in common."""

    objective: Objective
    params: Any
    splits: Splits
    engine: Any
    rounds: int
    clients_per_round: int
    min_success: float
    evaluate: Evaluate
    eval_every: int
    best: Best | None
    metrics: Sequence[str]

    @functools.cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, devices and fingerprints, as in `config.toml`."""
        train, validation, test = self.splits
        data = data_fingerprint({"clients": train, "validation": validation, "test": test})
        _, theta, _ = bind(self.objective, self.params)
        return environment(data=data, params=arrays_fingerprint(theta))

    @functools.cached_property
    def loss(self) -> str:
        """Values of the loss on synthetic examples."""
        objective, theta, _ = bind(self.objective, self.params)
        return probe_objective(complete(objective, self.splits.train), theta)


@dataclasses.dataclass(frozen=True)
class Assembly:
    """A method built for the problem, once for all seeds, which share its compiled programs."""

    setup: Setup
    method: Method

    @functools.cached_property
    def prepared(self) -> Prepared:
        setup = self.setup
        return prepare(setup.objective, setup.params, setup.splits.train, self.method, setup.rounds)

    @functools.cached_property
    def connected(self) -> tuple[Prepared, Engine]:
        """As the round loop runs it."""
        return connect_engine(self.setup.engine, self.prepared)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """All that determines the numbers, except seed and rounds."""
        setup, engine = self.setup, self.connected[1]
        best, name = setup.best, getattr(engine, "__qualname__", type(engine).__name__)
        described: dict[str, Any] = {}
        if isinstance(self.method, Described):
            described = {"method": self.method.name, "hyperparameters": self.method.settings()}
        return {
            "clients_per_round": int(setup.clients_per_round),
            "min_success": float(setup.min_success),
            "eval_every": int(setup.eval_every),
            "engine": str(name).split(".<locals>")[0].replace("_", "-"),
            "best": {} if best is None else {"metric": best.metric, "lower": is_lower(best)},
            "metrics": list(setup.metrics),
            "program": describe_program(self.method, self.prepared, setup.loss),
            **describe_prior(self.prepared, setup.splits.train),
            **described,
        }

    @functools.cached_property
    def burn_in(self) -> "Assembly | None":
        """FedAvg as in this method's burn-in; None if it has no burn-in, or one until a plateau.

        Methods of fedpa that take `burn_in_rounds` start as `fedavg` with the same arguments.
        """
        method = self.method
        if not _is_ours(method) or method.arguments.get("burn_in_rounds") in (None, 0, AUTO):
            return None
        taken = inspect.signature(fedavg).parameters
        given = {name: value for name, value in method.arguments.items() if name in taken}
        return Assembly(self.setup, fedavg(**given))


def _is_ours(method: Any) -> TypeGuard[Described]:
    return isinstance(method, Described) and method.builder.__module__.startswith(
        "fedpa.algorithms."
    )


@final
@dataclasses.dataclass(frozen=True)
class OwnRun(Run):
    """A run of the user's model."""

    assembly: Assembly
    num_rounds: int
    own_seed: int
    label: str | None = None
    tuned: Settings = dataclasses.field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return self.num_rounds

    @property
    def seed(self) -> int:
        return self.own_seed

    @property
    def settings(self) -> dict[str, Any]:
        """As `config.toml` has them."""
        counted = {"rounds": int(self.rounds), "seed": int(self.seed)}
        named = {} if self.label is None else {"label": self.label}
        tuned = {"tuned": dict(self.tuned)} if self.tuned else {}
        return {**named, **counted, **self.assembly.settings, **tuned}

    @property
    def key(self) -> str:
        return json.dumps(self.settings, sort_keys=True)

    def is_same(self, other: Run) -> bool:
        """Whether both have the same numbers; also compares functions, which `key` can't."""
        if not isinstance(other, OwnRun) or self.key != other.key:
            return False
        one, two = self.assembly.method, other.assembly.method
        if isinstance(one, Described) and isinstance(two, Described):
            return is_same(dict(one.arguments), dict(two.arguments))
        return one is two

    def find_burn_in(self) -> "OwnRun | None":
        first, method = self.assembly.burn_in, self.assembly.method
        if first is None or not isinstance(method, Described):
            return None
        rounds = method.arguments["burn_in_rounds"]
        return OwnRun(first, rounds, self.seed) if rounds < self.rounds else None

    def shorten(self, end: int | Plateau) -> "OwnRun | None":
        method = self.assembly.method
        if not _is_ours(method) or method.name != "fedavg" or method.arguments.get("rule"):
            return None
        if not isinstance(end, int) or end >= self.rounds:
            return None
        return OwnRun(self.assembly, end, self.seed)

    def check(self, out: Path) -> None:
        if not run_directory.is_run(out):
            return
        recorded, made_of = run_directory.read_run(out), self.assembly.setup.environment
        then, now = (
            {k: e.get(k) for k in ("data", "params")} for e in (recorded.environment, made_of)
        )
        # The probe of a method depends on loss and params: it is compared only if these are equal.
        changed = differences(then, now) or differences(
            recorded.settings, self.settings, NOT_COMPARED
        )
        if changed:
            raise FedpaError(f"out = {str(out)!r}: {'; '.join(changed)}. Give another directory")
        if recorded.summary is not None and recorded.summary["round"] > self.rounds:
            done = recorded.summary["round"]
            raise refuse("rounds", self.rounds, f"{str(out)!r} already has {done} rounds")

    def perform(self, out: Path, callbacks: Sequence[Callback], branch: Path | None) -> Fit:
        setup = self.assembly.setup
        prepared, engine = self.assembly.connected
        training = Training(
            prepared=prepared,
            data=setup.splits.train,
            engine=engine,
            rounds=self.rounds,
            clients_per_round=setup.clients_per_round,
            seed=self.seed,
            min_success=setup.min_success,
            evaluate=setup.evaluate,
            eval_every=setup.eval_every,
            callbacks=callbacks,
            best=setup.best,
            test=None if setup.splits.test is None else self._name_test,
            label=self.label or "",
        )
        place = Place(
            out=out,
            settings=self.settings,
            environment=setup.environment,
            options=RecordingOptions(),
            about={} if self.label is None else {"label": self.label, "seed": self.seed},
            branch=branch,
        )
        if run_directory.is_run(out):
            return resume_run(training, place)
        return start_run(training, place)

    def _name_test(self, model: Any, record: Mapping[str, Any]) -> dict[str, Any]:
        """The curve's last point is the test split's value."""
        names = [f"{name}{end}" for name in self.assembly.setup.metrics for end in _ENDS]
        return {f"test/{x}": record[f"eval/{x}"] for x in names if f"eval/{x}" in record}


_ENDS = ("", *(f"_p{p}" for p in PERCENTILES))


# Whether two methods have the same first rounds


def is_same(one: Any, other: Any, seen: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two settings are certainly the same, by value.

    Functions are the same if their code and all values that they close over are. In doubt the
    answer is no.

    Example:
        >>> import optax
        >>> is_same(optax.sgd(0.1), optax.sgd(0.1)), is_same(optax.sgd(0.1), optax.sgd(0.2))
        (True, False)
    """
    if one is other or (id(one), id(other)) in seen:  # a function may close over itself
        return True
    if type(one) is not type(other):
        return False
    seen = seen | {(id(one), id(other))}

    def all_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
        return len(these) == len(those) and all(map(same, these, those))

    same = functools.partial(is_same, seen=seen)
    match one:
        case bool() | int() | float() | complex() | str() | bytes():
            return bool(one == other)
        case np.ndarray() | np.generic() | jax.Array():
            return one.dtype == other.dtype and np.array_equal(one, other)
        case tuple() | list():
            return all_same(one, other)
        case Mapping():
            return list(one) == list(other) and all_same([*one.values()], [*other.values()])
        case functools.partial():
            return same(
                (one.func, one.args, one.keywords), (other.func, other.args, other.keywords)
            )
        case MethodType():
            return same((one.__func__, one.__self__), (other.__func__, other.__self__))
        case FunctionType():
            return (
                one.__code__ == other.__code__
                and one.__globals__ is other.__globals__
                and same(_list_values(one), _list_values(other))
            )
        case _:
            fields = dataclasses.fields(one) if dataclasses.is_dataclass(one) else ()
            pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields]
            return bool(pairs) and all(same(*pair) for pair in pairs)


def _list_values(function: FunctionType) -> tuple[Any, ...]:
    """List what a function's code uses, except its arguments and its module."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # an empty cell equals nothing else
            cells.append(cell)
    return (function.__defaults__, function.__kwdefaults__, cells)
