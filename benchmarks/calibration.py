"""When a posterior is worth its round: calibration of posteriors and of their controls.

    python -m benchmarks.calibration docs/results/calibration.csv
    python -m benchmarks.calibration docs/results/calibration.csv --show

Digits by writer and with label skew (a perceptron), tags (a bag of words), CIFAR-100 (a small
ResNet): short and long training, 20 and all examples of a client. Every row of
`fedpa.experiments.posterior` is measured: the point estimate, temperature scaling, isotropic
posteriors, Laplace's in several structures; with the first seed and all examples a five-run
ensemble, too. Out of distribution are CIFAR's images in grey, classes or tags that training left
out, or writers never seen. What the table has is not measured again.
"""

import argparse
import csv
import dataclasses
import functools
import io
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedpa
from benchmarks.tuned_methods import compare_seeds
from fedpa.atomic_write import write_atomically
from fedpa.data import from_mapping
from fedpa.data.federated import FederatedData
from fedpa.experiments.hyperparameters import resolve_hyperparameters
from fedpa.experiments.methods import METHODS
from fedpa.experiments.posterior import Data, check_ood, make_table
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.posterior import PredictionSettings, measure_curvature
from fedpa.training.problem import Problem

ENSEMBLE = 5
"""Runs of an ensemble: the model and those of the next seeds."""
VALUES = ("nll", "brier", "ece", "accuracy", "ood_entropy", "ood_mutual")


class Federation(NamedTuple):
    """A problem as it is trained and measured."""

    task: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Of FedAvg, where they differ from the task's preset."""
    rounds: Mapping[str, int]
    """Kind of training → rounds."""
    examples: Mapping[str, int | None]
    """Kind of data → most examples per client; None: all."""
    seeds: int
    structures: Sequence[str]
    """Of the first seed; others have the first two."""
    is_held_out: Callable[[np.ndarray], Any] | None = None
    """Labels → which examples are in no split, and out of distribution instead."""
    has_ensemble: bool = True
    """Whether an ensemble is measured, with the first seed and all examples."""
    ood: str = "held out"
    """grey: CIFAR's images in grey; unseen: half of the validation clients; held out: examples with
    such labels."""
    choosing: PredictionSettings = PredictionSettings(30, batch_size=200, most=2000)
    """How a trial of the 21 is measured."""
    measured: PredictionSettings = PredictionSettings(30, batch_size=200)


WRITERS = {"dataset": "fed_emnist_digitsonly", "model": "mlp", "validation_share": 0.1}
SKEW = {**WRITERS, "label_skew": 0.1}
MLP = {
    "epochs": 5,
    "client_learning_rate": 0.1,
    "client_momentum": 0.0,
    "server_learning_rate": 1.0,
    "server_momentum": 0.0,
}
DIGITS = Federation(
    "emnist",
    SKEW,
    MLP,
    rounds={"short": 100, "long": 1000},
    examples={"20": 20, "all": None},
    seeds=3,
    structures=("kronecker", "last-layer", "diagonal", "low-rank"),
    ood="grey",
)
PROBLEMS = {
    "label-skew": DIGITS,
    "writers": DIGITS._replace(options=WRITERS),
    "digits-8-9-held-out": DIGITS._replace(
        examples={"all": None},
        structures=DIGITS.structures[:2],
        is_held_out=lambda label: label >= 8,
        ood="held out",
    ),
    "writers-unseen": DIGITS._replace(
        options=WRITERS, examples={"all": None}, structures=DIGITS.structures[:2], ood="unseen"
    ),
    "tags": Federation(
        "stackoverflow-lr",
        {"vocabulary": 2000},
        {},
        rounds={"short": 100, "long": 400},
        examples={"20": 20, "all": 128},
        seeds=2,
        structures=("kronecker",),
        has_ensemble=False,
        is_held_out=lambda tags: tags[:, ::10].any(axis=1),
    ),
    "cifar100": Federation(
        "cifar100",
        {"model": "small-resnet", "validation_share": 0.1},
        {"epochs": 5},
        rounds={"short": 100, "long": 400},
        examples={"20": 20},
        seeds=1,
        structures=("kronecker",),
        is_held_out=lambda label: label >= 90,
        choosing=PredictionSettings(10, batch_size=100, most=200),
        measured=PredictionSettings(30, batch_size=100, most=1000),
    ),
}


class Case(NamedTuple):
    """A trained model and a structure of its posterior."""

    problem: str
    training: str
    examples: str
    seed: int
    structure: str


FIELDS = (*Case._fields, "row", "trials", *VALUES, "settings", "seconds")


def cases(names: Sequence[str] = tuple(PROBLEMS)) -> Iterator[Case]:
    """All cases, those of the first seed first."""
    for seed, name in itertools.product(range(max(p.seeds for p in PROBLEMS.values())), names):
        problem = PROBLEMS[name]
        if seed < problem.seeds:
            some = problem.structures[: None if seed == 0 else 2]
            for case in itertools.product(problem.rounds, problem.examples, [seed], some):
                yield Case(name, *case)


class Loaded(NamedTuple):
    problem: Problem
    ood: FederatedData


@functools.lru_cache(maxsize=2)
def load(name: str, examples: str, data_dir: str | None) -> Loaded:
    own = PROBLEMS[name]
    given = {"data_dir": data_dir, "max_examples": own.examples[examples], **own.options}
    problem = task_named(own.task).load(TaskOptions(**given))
    if own.ood == "grey":
        return Loaded(problem, load_grey(data_dir))
    assert problem.validation is not None
    if own.ood == "unseen":
        ids = problem.validation.ids
        parts = [problem.validation._replace(ids=part) for part in (ids[::2], ids[1::2])]
        return Loaded(problem._replace(validation=parts[0]), parts[1])
    is_held_out = own.is_held_out
    assert is_held_out is not None

    def is_kept(labels: np.ndarray) -> Any:
        return ~is_held_out(labels)

    kept = problem._replace(
        clients=take(problem.clients, is_kept),
        validation=take(problem.validation, is_kept),
        test=take(problem.test, is_kept),
    )
    return Loaded(kept, take(problem.test, is_held_out))


def take(data: FederatedData, which: Callable[[np.ndarray], Any]) -> FederatedData:
    """Take the examples whose labels are such; clients without any are left out."""
    clients = {}
    for name in data.ids:
        raw = data.examples(name)
        chosen = which(raw["y"])
        if chosen.any():
            clients[name] = {field: array[chosen] for field, array in raw.items()}
    return from_mapping(clients)


@functools.cache
def load_grey(data_dir: str | None) -> FederatedData:
    """CIFAR-100's test images as digits are: 28×28, one channel, dark background."""
    test = task_named("cifar100").load(TaskOptions(data_dir=data_dir, model="small-resnet")).test
    x = np.concatenate([test.examples(name)["x"] for name in test.ids[:20]])
    grey = x.astype(np.float32).mean(axis=-1)[:, 2:30, 2:30, None] / 255
    return from_mapping({"cifar": {"x": grey}})


@functools.lru_cache(maxsize=ENSEMBLE)
def train(name: str, training: str, examples: str, seed: int, data_dir: str | None) -> Any:
    own, loaded = PROBLEMS[name], load(name, examples, data_dir).problem
    preset = next(iter(task_named(own.task).presets.values()))
    h = dataclasses.replace(preset.hyperparameters, burn_in_rounds=0, **own.settings)
    return fedpa.fit(
        loaded.objective,
        loaded.init(jax.random.key(seed)),
        loaded.clients,
        METHODS["fedavg"].build(resolve_hyperparameters(h)),
        rounds=own.rounds[training],
        clients_per_round=10,
        seed=seed,
        progress=False,
    ).params


def measure(case: Case, data_dir: str | None) -> list[dict[str, Any]]:
    own = PROBLEMS[case.problem]
    problem, ood = load(case.problem, case.examples, data_dir)
    assert problem.likelihood is not None
    model = train(*case[:4], data_dir)
    is_first = case.seed == 0 and case.structure == own.structures[0] and case.examples == "all"
    others = range(1, ENSEMBLE if own.has_ensemble and is_first else 1)
    began = time.perf_counter()
    curvature = measure_curvature(
        model,
        problem.likelihood,
        problem.clients,
        structure=case.structure,  # type: ignore[arg-type]
        seed=case.seed,
        progress=False,
    )
    seconds = time.perf_counter() - began
    _, rows = make_table(
        curvature,
        problem.likelihood,
        Data(problem.test, problem.validation, check_ood(problem.likelihood, ood, problem.test)),
        own.measured,
        choosing=own.choosing,
        ensemble=[train(*case[:3], seed, data_dir) for seed in others],
        seed=case.seed,
    )
    return [
        {
            **case._asdict(),
            "row": row.name,
            "trials": row.trials,
            **{name: format(row.values.get(name, math.nan), ".6g") for name in VALUES},
            "settings": " ".join(f"{k}={v:.4g}" for k, v in row.settings.items()),
            "seconds": format(seconds, ".3g"),
        }
        for row in rows
    ]


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows of a case, or none of them."""
    text = io.StringIO()
    table = csv.DictWriter(text, FIELDS, lineterminator="\n")
    table.writeheader()
    table.writerows([*read(path), *rows])
    write_atomically(path, text.getvalue().encode())


def show(rows: list[dict[str, str]]) -> None:
    """Print means over seeds, and of the NLL what is below the point estimate's, paired by seed."""
    groups: dict[tuple[str, ...], dict[int, dict[str, str]]] = {}
    for row in rows:
        case = (row["problem"], row["training"], row["examples"])
        groups.setdefault((*case, name_row(row)), {})[int(row["seed"])] = row
    print("| problem | training | examples | prediction | seeds | gain | ", end="")
    print(" | ".join(VALUES) + " |\n" + "| --- " * (6 + len(VALUES)) + "|")

    def read(found: Mapping[int, dict[str, str]], value: str) -> dict[int, float]:
        return {seed: float(row[value]) for seed, row in found.items()}

    for key, found in groups.items():
        point = read(groups[*key[:3], "point"], "nll")
        gain = compare_seeds(point, read(found, "nll")) if key[3] != "point" else ""
        means = [f"{np.mean([*read(found, name).values()]):.4f}" for name in VALUES]
        print("| " + " | ".join([*key, str(len(found)), gain, *means]) + " |")


def name_row(row: Mapping[str, str]) -> str:
    """Name a row, whose structure is part of the name where it matters."""
    if row["row"] in ("point", "temperature", "ensemble"):
        return row["row"]
    if row["row"] == "laplace":
        return row["structure"]
    return f"{row['row']}, as {row['structure']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--problems", default=",".join(PROBLEMS), help="default: all")
    parser.add_argument("--show", action="store_true", help="print the table, measure nothing")
    given = parser.parse_args()
    fedpa.configure()
    for case in () if given.show else cases(given.problems.split(",")):
        done = {tuple(row[name] for name in Case._fields) for row in read(given.table)}
        if tuple(map(str, case)) not in done:
            began = time.perf_counter()
            append(given.table, measure(case, given.data_dir))
            print(*case, f"{time.perf_counter() - began:.0f} s", flush=True)
            jax.clear_caches()  # hundreds of programs would exceed a process's memory mappings
    show(read(given.table))


if __name__ == "__main__":
    main()
