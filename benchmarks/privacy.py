"""Accuracy against ε: methods under differential privacy, on digits by writer.

    python -m benchmarks.privacy docs/results/privacy.csv --data-dir DIR
    python -m benchmarks.privacy docs/results/privacy.csv --figure docs/results/privacy.png

836 writers are far too few for a real guarantee. So a deployment is assumed (`POPULATION` clients,
`COHORT` of them a round, Poisson sampling): its noise multiplier z follows from ε and δ, and the
simulation has the same noise on the mean of its much smaller cohort, z · simulated/assumed. The
columns `epsilon` and `noise_multiplier` are of the assumed deployment, `simulated_noise` is what
the run was given, and the ε of its 836 writers is another, much larger one.

Every method tries as many settings, a grid of clipping norms and rates, at each ε, chosen by the
loss of validation writers; then it runs with fresh seeds, measured on the test split. Runs that the
table has are kept: an interrupted measurement continues.
"""

import argparse
import csv
import dataclasses
import functools
import io
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

import fedpa
from benchmarks.tuned_methods import _typed
from fedpa.atomic_write import write_atomically
from fedpa.experiments.hyperparameters import resolve_hyperparameters
from fedpa.experiments.methods import METHODS as NAMED
from fedpa.experiments.report.figures import new_figure, render_figure, tidy
from fedpa.experiments.report.looks import choose_looks, style_line
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.metrics.streaming import make_evaluator
from fedpa.privacy import find_noise_multiplier
from fedpa.training.problem import Problem

POPULATION, COHORT, DELTA = 100_000, 200, 1e-6
"""Of the assumed deployment: clients, clients a round, δ."""
EPSILONS = (math.inf, 8.0, 3.0, 1.0)
"""inf: not private."""
CLIENTS = 50
"""A round of the simulation."""
ROUNDS = 100
SEEDS = 3
TRIAL_SEED = 1000
LAST = 0.1
"""Share of the evaluations at the end that are averaged."""
EVAL_EVERY = 5
CLIPS = (0.3, 1.0, 3.0)
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"client_learning_rate": 0.3},
    "fedpa": {"client_learning_rate": 0.3, "rho": 0.01},
    "global-precision": {
        "client_learning_rate": 0.1,
        "precision_rank": "exact",
        "precision_length": 0.0,
    },
}
"""Method → its own settings; FedPA samples in the second half of the rounds."""
RATES = {"fedavg": (1.0, 3.0), "fedpa": (1.0, 3.0), "global-precision": (2.0, 6.0)}
"""Of the server, without momentum."""
EXTRA_SCALE = 0.003
"""Brings the precision's factors, of norm 100 or so, to the scale of Δ, of norm 1 or so."""
EPOCHS = 5


class Trial(NamedTuple):
    """What decides a run."""

    kind: str
    """"trial" or "run"."""
    method: str
    epsilon: float
    clip: float
    rate: float
    """Of the server."""
    seed: int
    rounds: int


class Outcome(NamedTuple):
    """What came of it, and the noise it was given."""

    accuracy: float
    loss: float
    clipped: float
    """The share of clients that were clipped."""
    noise_multiplier: float
    simulated_noise: float
    own_epsilon: float
    """Of the simulation's 836 writers, at δ = 10⁻³."""
    seconds: float


FIELDS = (*Trial._fields, *Outcome._fields)
CONSTANTS = {"population": POPULATION, "cohort": COHORT, "delta": DELTA, "simulated": CLIENTS}
"""Columns that say the same in every row."""
Table = dict[Trial, Outcome]


def read(path: Path) -> Table:
    """Read the table."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Trial(*(_typed(Trial, name, row[name]) for name in Trial._fields)): Outcome(
                *(float(row[name]) for name in Outcome._fields)
            )
            for row in csv.DictReader(file)
        }


def append(path: Path, trial: Trial, outcome: Outcome) -> None:
    """Add a whole run's row."""
    text = io.StringIO(path.read_text() if path.exists() else "")
    rows = csv.writer(text, lineterminator="\n")
    if not text.seek(0, io.SEEK_END):
        rows.writerow([*FIELDS, *CONSTANTS])
    rows.writerow([*trial, *(format(x, ".6g") for x in outcome), *CONSTANTS.values()])
    write_atomically(path, text.getvalue().encode())


@functools.cache
def load(data_dir: str | None) -> Problem:
    options = TaskOptions(
        data_dir=data_dir, validation_share=0.1, dataset="fed_emnist_digitsonly", model="mlp"
    )
    return task_named("emnist").load(options)


@functools.cache
def find_noise(epsilon: float, rounds: int) -> float:
    """z of the assumed deployment; 0 where it is not private."""
    if math.isinf(epsilon):
        return 0.0
    return find_noise_multiplier(epsilon, DELTA, rounds=rounds, clients=POPULATION, cohort=COHORT)


def build(trial: Trial) -> Any:
    """The trial's method."""
    named = NAMED[trial.method]
    preset = next(iter(task_named("emnist").presets.values()))
    plain = dataclasses.replace(
        preset.hyperparameters,
        epochs=EPOCHS,
        server_optimizer="sgd",
        server_learning_rate=1.0,
        server_momentum=0.0,
        client_momentum=0.0,
        burn_in_rounds=0,
        weighting="uniform",
    )
    own = dict(METHODS[trial.method])
    if named.begins_as_fedavg and named.samples:
        own["burn_in_rounds"] = trial.rounds // 2
    chosen = dataclasses.replace(named.defaults(plain), server_learning_rate=trial.rate, **own)
    method = named.build(resolve_hyperparameters(named.adjust(chosen)))
    noise = find_noise(trial.epsilon, trial.rounds)
    if not noise:
        return method
    return fedpa.private(
        method,
        clip=trial.clip,
        noise_multiplier=noise * CLIENTS / COHORT,
        delta=1e-3,
        accountant="rdp",
        extra_scale=EXTRA_SCALE if trial.method == "global-precision" else 1.0,
    )


def run(trial: Trial, data_dir: str | None) -> Outcome:
    problem = load(data_dir)
    data = problem.test if trial.kind == "run" else problem.validation
    assert data is not None
    evaluate = make_evaluator(problem.metric, data, 200)
    began = time.perf_counter()
    result = fedpa.fit(
        problem.objective,
        problem.init(jax.random.key(trial.seed)),
        problem.clients,
        build(trial),
        rounds=trial.rounds,
        clients_per_round=CLIENTS,
        seed=trial.seed,
        evaluate=lambda params: evaluate(params).values,
        eval_every=min(EVAL_EVERY, trial.rounds),
        progress=False,
    )
    seconds = time.perf_counter() - began
    evaluated = [record for record in result.history if "eval/accuracy" in record]
    last = evaluated[-max(1, math.ceil(LAST * len(evaluated))) :]
    accuracy, loss = (float(np.mean([r[f"eval/{x}"] for r in last])) for x in ("accuracy", "loss"))
    clipped = [record.get("train/clipped", 0.0) for record in result.history]
    noise = find_noise(trial.epsilon, trial.rounds)
    spent = result.history[-1].get("privacy/epsilon", math.inf)
    share = float(np.nanmean(clipped))
    simulated = noise * CLIENTS / COHORT
    return Outcome(accuracy, loss, share, noise, simulated, spent, seconds)


def list_trials(
    method: str, epsilon: float, rounds: int, clips: Sequence[float]
) -> Iterator[Trial]:
    """The settings that are tried; without privacy nothing is clipped."""
    clips = (math.inf,) if math.isinf(epsilon) else clips
    for clip, rate in itertools.product(clips, RATES[method]):
        yield Trial("trial", method, epsilon, clip, rate, TRIAL_SEED, rounds)


def choose(table: Table, tried: Sequence[Trial]) -> Trial:
    """The trial of the least finite loss."""
    losses = {one: table[one].loss for one in tried if one in table}
    return min(losses, key=lambda one: losses[one] if math.isfinite(losses[one]) else math.inf)


def measure(
    path: Path,
    data_dir: str | None,
    methods: Sequence[str] = tuple(METHODS),
    epsilons: Sequence[float] = EPSILONS,
    rounds: int = ROUNDS,
    seeds: int = SEEDS,
    clips: Sequence[float] = CLIPS,
) -> None:
    """Run what the table lacks."""
    for method, epsilon in itertools.product(methods, epsilons):
        tried = list(list_trials(method, epsilon, rounds, clips))
        for trial in tried:
            carry_out(trial, path, data_dir)
        chosen = choose(read(path), tried)
        for seed in range(seeds):
            carry_out(chosen._replace(kind="run", seed=seed), path, data_dir)


def carry_out(trial: Trial, path: Path, data_dir: str | None) -> None:
    if trial in read(path):
        return
    outcome = run(trial, data_dir)
    append(path, trial, outcome)
    print(*trial, f"{outcome.accuracy:.4f} {outcome.loss:.4f} {outcome.seconds:.0f} s", flush=True)


def group_runs(table: Table) -> dict[str, dict[float, list[Outcome]]]:
    """Method → ε → its runs."""
    groups: dict[str, dict[float, list[Outcome]]] = {}
    for trial, outcome in table.items():
        if trial.kind == "run":
            groups.setdefault(trial.method, {}).setdefault(trial.epsilon, []).append(outcome)
    return groups


def show(table: Table) -> None:
    """Print accuracies, a row for each method."""
    groups = group_runs(table)
    epsilons = sorted({e for of in groups.values() for e in of}, reverse=True)
    heads = ["method", *("not private" if math.isinf(e) else f"ε = {e:g}" for e in epsilons)]
    print("| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|", sep="\n")
    for method, of in groups.items():
        cells = [method]
        for epsilon in epsilons:
            values = np.array([outcome.accuracy for outcome in of.get(epsilon, [])])
            spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
            cells.append(f"{values.mean():.3f}{spread}" if len(values) else "–")
        print("| " + " | ".join(cells) + " |")
    print(
        f"\nAssumed: {POPULATION:,} clients, {COHORT:,} a round, δ = {DELTA:g}; noise scaled to "
        f"{CLIENTS} simulated clients a round."
    )


def draw(table: Table) -> Figure:
    """Accuracy by ε, mean and range over seeds; not private at the right end."""
    figure = new_figure(5.0, 3.4)
    axes = figure.add_subplot()
    looks = choose_looks({method: method for method in METHODS})
    shown: list[float] = []
    for method, of in group_runs(table).items():
        epsilons = sorted(of)
        values = [[outcome.accuracy for outcome in of[e]] for e in epsilons]
        places = [
            e if math.isfinite(e) else 2 * max(filter(math.isfinite, EPSILONS)) for e in epsilons
        ]
        style = style_line(looks[method])
        axes.plot(places, [np.mean(v) for v in values], label=method, markersize=4, **style)
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(places, low, high, color=style["color"], alpha=0.15, lw=0)
        shown += [*low, *high]
    axes.set_xscale("log")
    ticks = sorted(e for e in EPSILONS if math.isfinite(e))
    axes.set_xticks([*ticks, 2 * ticks[-1]], [*(f"{e:g}" for e in ticks), "none"])
    axes.minorticks_off()
    if shown:
        axes.set_ylim(min(shown) - 0.01, max(shown) + 0.01)
    tidy(axes, "digits by writer", "ε of the assumed deployment", "test accuracy")
    axes.legend(fontsize=6, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--quick", action="store_true", help="two settings, few rounds")
    parser.add_argument("--figure", type=Path, help="PNG file to draw the table in, and no runs")
    given = parser.parse_args()
    fedpa.configure()
    if given.quick:
        measure(
            given.table,
            given.data_dir,
            epsilons=(8.0,),
            rounds=2,
            seeds=1,
            clips=(1.0,),
        )
    elif given.figure is None:
        measure(given.table, given.data_dir)
    table = read(given.table)
    show(table)
    if given.figure:
        given.figure.write_bytes(render_figure(draw(table), "png"))


if __name__ == "__main__":
    main()
