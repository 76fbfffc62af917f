"""When a posterior is worth its round: calibration of posteriors and of their controls.

    python -m benchmarks.calibration docs/results/calibration.csv
    python -m benchmarks.calibration docs/results/calibration.csv --show

Digits with label skew or by writer, an MLP: short and long training, 20 and all examples of a
client, three seeds; out of distribution are CIFAR's images in grey. Every row of
`fedpa.experiments.posterior` is measured: the point estimate, temperature scaling, isotropic
posteriors, Laplace's in four structures. What the table has is not measured again.
"""

import argparse
import csv
import functools
import io
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fedpa
from fedpa.atomic_write import write_atomically
from fedpa.data import from_mapping
from fedpa.data.federated import FederatedData
from fedpa.experiments.posterior import Data, check_ood, make_table
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.posterior import PredictionSettings, measure_curvature
from fedpa.training.problem import Problem

PROBLEMS = {"label-skew": {"label_skew": 0.1}, "writers": {}}
ROUNDS = {"short": 100, "long": 1000}
EXAMPLES = {"20": 20, "all": None}
SEEDS = 3
STRUCTURES = ("kronecker", "last-layer", "diagonal", "low-rank")
VALUES = ("nll", "brier", "ece", "accuracy", "ood_entropy", "ood_mutual")
CHOICE = 2000
"""Validation examples of a trial."""


class Case(NamedTuple):
    """A trained model and a structure of its posterior."""

    problem: str
    training: str
    examples: str
    seed: int
    structure: str


FIELDS = (*Case._fields, "row", "trials", *VALUES, "settings", "seconds")


def cases() -> Iterator[Case]:
    for seed in range(SEEDS):
        for problem, training, examples in itertools.product(PROBLEMS, ROUNDS, EXAMPLES):
            for structure in STRUCTURES if seed == 0 else ("kronecker", "last-layer"):
                yield Case(problem, training, examples, seed, structure)


@functools.cache
def load(problem: str, examples: str, data_dir: str | None) -> Problem:
    options = TaskOptions(
        data_dir=data_dir,
        dataset="fed_emnist_digitsonly",
        model="mlp",
        validation_share=0.1,
        max_examples=EXAMPLES[examples],
        **PROBLEMS[problem],
    )
    return task_named("emnist").load(options)


@functools.cache
def load_grey(data_dir: str | None) -> FederatedData:
    """CIFAR-100's test images as digits are: 28×28, one channel, dark background."""
    test = task_named("cifar100").load(TaskOptions(data_dir=data_dir, model="small-resnet")).test
    x = np.concatenate([test.examples(name)["x"] for name in test.ids[:20]])
    grey = x.astype(np.float32).mean(axis=-1)[:, 2:30, 2:30, None] / 255
    return from_mapping({"cifar": {"x": grey}})


@functools.lru_cache(maxsize=1)
def train(problem: str, training: str, examples: str, seed: int, data_dir: str | None) -> Any:
    loaded = load(problem, examples, data_dir)
    local = fedpa.LocalTraining(0.1, batch_size=20, epochs=5)
    return fedpa.fit(
        loaded.objective,
        loaded.init(jax.random.key(seed)),
        loaded.clients,
        fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0))),
        rounds=ROUNDS[training],
        clients_per_round=10,
        seed=seed,
        progress=False,
    ).params


def measure(case: Case, data_dir: str | None) -> list[dict[str, Any]]:
    problem = load(case.problem, case.examples, data_dir)
    assert problem.likelihood is not None
    model = train(*case[:4], data_dir)
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
    settings = PredictionSettings(30, batch_size=200)
    ood = check_ood(problem.likelihood, load_grey(data_dir), problem.test)
    _, rows = make_table(
        curvature,
        problem.likelihood,
        Data(problem.test, problem.validation, ood),
        settings,
        choosing=settings._replace(most=CHOICE),
        seed=case.seed,
    )
    return [
        {
            **case._asdict(),
            "row": row.name,
            "trials": row.trials,
            **{name: format(row.values[name], ".6g") for name in VALUES},
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
    """Print means over seeds: a line for each row of each model."""
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        shown = row["row"] if row["row"] in ("point", "temperature") else row["structure"]
        if row["row"].startswith("isotropic"):
            shown = f"{row['row']}, as {row['structure']}"
        key = (row["problem"], row["training"], row["examples"], shown)
        groups.setdefault(key, []).append(row)
    print("| problem | training | examples | prediction | seeds | " + " | ".join(VALUES) + " |")
    print("| --- " * (5 + len(VALUES)) + "|")
    for key, found in groups.items():
        by_seed = {row["seed"]: row for row in found}
        cells = [
            f"{np.mean([float(row[name]) for row in by_seed.values()]):.4f}" for name in VALUES
        ]
        print("| " + " | ".join([*key, str(len(by_seed)), *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--show", action="store_true", help="print the table, measure nothing")
    given = parser.parse_args()
    fedpa.configure()
    for case in () if given.show else cases():
        done = {tuple(row[name] for name in Case._fields) for row in read(given.table)}
        if tuple(map(str, case)) not in done:
            began = time.perf_counter()
            append(given.table, measure(case, given.data_dir))
            print(*case, f"{time.perf_counter() - began:.0f} s", flush=True)
    show(read(given.table))


if __name__ == "__main__":
    main()
