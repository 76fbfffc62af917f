"""Methods at their best rates, to the plateau: accuracy, rounds, bytes and seconds to targets.

    python -m benchmarks.tuned_methods emnist-skew-mlp docs/results/tuned.csv
    python -m benchmarks.tuned_methods docs/results/tuned.csv --figure docs/results/tuned.png
    python -m benchmarks.tuned_methods emnist-skew-mlp docs/results/tuned.csv --seconds 40

Every method has the same number of trials for its rates, a grid of the client's and the server's,
at half of the rounds, with a seed of their own, chosen by the loss of validation clients (tags: by
recall). Then it runs with its best rates and fresh seeds, measured on the test split (tags: also on
the validation clients that chose the rates, because the test split is of other sites). Runs that
the table has are kept: an interrupted comparison continues.

The table's seconds are those of runs beside other work. `--seconds N` measures instead what a round
takes: the first N rounds of every method, in turns.
"""

import argparse
import csv
import dataclasses
import functools
import io
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import scipy.stats
from matplotlib.figure import Figure

import fedpa
from fedpa.atomic_write import write_atomically
from fedpa.experiments.hyperparameters import Hyperparameters, resolve_hyperparameters
from fedpa.experiments.methods import METHODS as NAMED
from fedpa.experiments.report.figures import new_figure, render_figure, tidy
from fedpa.experiments.report.looks import choose_looks, style_line
from fedpa.experiments.tasks.task import Preset, TaskOptions, task_named
from fedpa.metrics.streaming import Evaluation, make_evaluator
from fedpa.training.problem import Problem

TRIAL_SEED = 1000
START_SEED = 100
CLIENTS = 10
"""Of a round."""
TURNS = 3
"""In which rounds are timed."""
SHARE = 0.1
"""Of the evaluations at the end of a run that are averaged as its result."""


class Tuned(NamedTuple):
    """A method as it is tuned."""

    setting: str
    """What the server has: its rate, or what takes its place."""
    method: str = ""
    """The command's name of it; "": the same."""
    fixed: Mapping[str, Any] = {}


RATE, LENGTH = Tuned("server_learning_rate"), Tuned("precision_length")
METHODS = {
    "fedavg": RATE,
    "fedavgm": RATE,
    "fedadagrad": RATE,
    "fedadam": RATE,
    "fedyogi": RATE,
    "fedexp": Tuned("fedexp_epsilon"),
    "mime": Tuned("server_momentum"),
    "global-precision": LENGTH,
    "global-precision-diagonal": LENGTH,
    "local-precision": RATE,
    "local-and-global": LENGTH._replace(
        method="global-precision", fixed={"numerator": "local-precision"}
    ),
}


class Comparison(NamedTuple):
    """A task as it is compared."""

    title: str
    task: str
    options: Mapping[str, Any]
    rounds: int
    seeds: int
    eval_every: int
    client_rates: Sequence[float]
    servers: Mapping[str, Sequence[float]]
    """The methods, and the values tried for each one's server setting."""
    targets: Sequence[float]
    client_momentum: float = 0.0
    eval_examples: int | None = None
    """At most, of an evaluation; None: all."""
    chosen_by: Literal["loss", "accuracy"] = "loss"
    """Of validation clients."""
    run_kinds: Sequence[str] = ("run",)
    """What runs are measured on, see `Trial.kind`."""
    start: int = 0
    """Rounds of the task's preset with FedAvg, after which all runs begin."""


WRITERS = {"dataset": "fed_emnist_digitsonly"}
SKEW = {**WRITERS, "label_skew": 0.1}
MLP, CNN = {"model": "mlp"}, {"model": "cnn", "max_examples": 40}
PERCEPTRON = Comparison(
    "digits with label skew, perceptron",
    "emnist",
    {**SKEW, **MLP},
    rounds=150,
    seeds=5,
    eval_every=2,
    client_rates=(0.1, 0.3, 0.9),
    servers={
        "fedavg": (0.3, 1.0, 3.0),
        "fedavgm": (0.1, 0.3, 1.0),
        "fedadam": (0.01, 0.03, 0.1),
        "fedyogi": (0.01, 0.03, 0.1),
        "fedexp": (1e-4, 1e-3, 1e-2),
        "mime": (0.5, 0.9, 0.99),
        "global-precision": (0.7, 1.4, 2.8),
        "global-precision-diagonal": (0.7, 1.4, 2.8),
    },
    targets=(0.9, 0.93, 0.95, 0.96),
)
LOCAL_OR_GLOBAL = PERCEPTRON._replace(
    title="precision in local steps, at the server, both",
    rounds=100,
    seeds=3,
    client_rates=(0.1, 0.3),
    servers={
        "fedavg": (1.0, 3.0),
        "local-precision": (1.0, 3.0),
        "global-precision": (1.4, 2.8),
        "local-and-global": (1.4, 2.8),
    },
)
CONVOLUTIONAL = Comparison(
    "digits with label skew, CNN",
    "emnist",
    {**SKEW, **CNN},
    rounds=60,
    seeds=3,
    eval_every=2,
    client_rates=(0.01, 0.03),
    servers={
        "global-precision": (0.7, 1.4),
        "fedyogi": (0.01, 0.03),
        "fedavgm": (0.3, 1.0),
        "global-precision-diagonal": (0.7, 1.4),
    },
    targets=(0.9, 0.95, 0.97),
    client_momentum=0.9,
    eval_examples=4000,
)
IMAGES = Comparison(
    "CIFAR-100, small ResNet",
    "cifar100",
    {"model": "small-resnet"},
    rounds=80,
    seeds=2,
    eval_every=4,
    client_rates=(0.01, 0.03),
    servers={
        "global-precision": (0.35, 0.7),
        "fedyogi": (0.003, 0.01),
        "fedavgm": (0.03, 0.1),
        "global-precision-diagonal": (0.35, 0.7),
    },
    targets=(0.12, 0.14, 0.16),
    client_momentum=0.9,
    eval_examples=4000,
    start=100,
)
NEXT_WORD = Comparison(
    "next word, LSTM",
    "stackoverflow-nwp",
    {"model": "small-lstm", "vocabulary": 1000, "max_examples": 64},
    rounds=60,
    seeds=3,
    eval_every=3,
    client_rates=(0.3, 1.0),
    servers={
        "global-precision": (0.7, 1.4),
        "fedyogi": (0.003, 0.01),
        "fedadam": (0.003, 0.01),
        "fedavgm": (0.03, 0.1),
        "global-precision-diagonal": (0.7, 1.4),
    },
    targets=(0.13, 0.14, 0.15),
    eval_examples=4000,
    start=300,
)
TAGS = Comparison(
    "tags, bag of words",
    "stackoverflow-lr",
    {"vocabulary": 2000, "max_examples": 128},
    rounds=150,
    seeds=3,
    eval_every=5,
    client_rates=(15.0, 50.0),
    servers={
        "global-precision": (12.0, 40.0),
        "fedadagrad": (5.0, 15.0),
        "fedyogi": (1.0, 3.0),
        "fedadam": (0.3, 1.0),
    },
    targets=(0.3, 0.35, 0.4, 0.45),
    chosen_by="accuracy",
    run_kinds=("run", "validation"),
    eval_examples=8000,
)
COMPARISONS = {
    "emnist-skew-mlp": PERCEPTRON,
    "emnist-writers-mlp": PERCEPTRON._replace(
        title="digits by writer, perceptron", options={**WRITERS, **MLP}
    ),
    "local-or-global": LOCAL_OR_GLOBAL,
    "emnist-skew-cnn": CONVOLUTIONAL,
    "emnist-writers-cnn": CONVOLUTIONAL._replace(
        title="digits by writer, CNN", options={**WRITERS, **CNN}
    ),
    "cifar100": IMAGES,
    "next-word": NEXT_WORD,
    "tags": TAGS,
}


class Trial(NamedTuple):
    """A run's settings; a row of the table has them and one evaluation."""

    comparison: str
    method: str
    kind: str
    """trial: short, measured on validation clients; run: measured on the test split; validation:
    a run measured on validation clients."""
    client_rate: float
    server: float
    """The value of the method's setting in `METHODS`."""
    seed: int


class Point(NamedTuple):
    """An evaluation."""

    round: int
    accuracy: float
    """The task's metric: accuracy, recall@5 of tags."""
    loss: float
    megabytes: float
    """Sent by clients so far."""
    seconds: float
    """Of all rounds so far, without compiling and evaluations."""


FIELDS = (*Trial._fields, *Point._fields)
Table = dict[Trial, list[Point]]


def read(path: Path) -> Table:
    """Read the table."""
    table: Table = {}
    if path.exists():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = Trial(*(_typed(Trial, name, row[name]) for name in Trial._fields))
                point = Point(*(_typed(Point, name, row[name]) for name in Point._fields))
                table.setdefault(key, []).append(point)
    return table


def _typed(kind: Any, name: str, text: str) -> Any:
    return kind.__annotations__[name](text)


def append(path: Path, measured: Table) -> None:
    """Write all of a run's rows, or none of them."""
    text = io.StringIO(path.read_text() if path.exists() else "")
    rows = csv.writer(text, lineterminator="\n")
    if not text.seek(0, io.SEEK_END):
        rows.writerow(FIELDS)
    for trial, points in measured.items():
        for point in points:
            numbers = [format(x, ".6g") for x in point[1:]]
            rows.writerow([*trial, point.round, *numbers])
    write_atomically(path, text.getvalue().encode())


@functools.cache
def load(name: str, data_dir: str | None) -> Problem:
    comparison = COMPARISONS[name]
    options = TaskOptions(data_dir=data_dir, validation_share=0.1, **comparison.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task_named(comparison.task).load(options)


@functools.cache
def evaluator(name: str, kind: str, data_dir: str | None) -> Callable[[Any], Evaluation]:
    problem, most = load(name, data_dir), COMPARISONS[name].eval_examples
    data = problem.test if kind == "run" else problem.validation
    assert data is not None
    return make_evaluator(problem.metric, data, 200, most)


@functools.cache
def train_start(name: str, data_dir: str | None) -> Any:
    """Train the model that all runs begin with."""
    comparison, problem = COMPARISONS[name], load(name, data_dir)
    preset = find_preset(comparison)
    h = dataclasses.replace(preset.hyperparameters, burn_in_rounds=0)
    result = fedpa.fit(
        problem.objective,
        problem.init(jax.random.key(START_SEED)),
        problem.clients,
        NAMED["fedavg"].build(resolve_hyperparameters(h)),
        rounds=comparison.start,
        clients_per_round=preset.clients_per_round,
        seed=START_SEED,
        out=Path(".bench") / f"{name}-start",
    )
    return result.params


def find_preset(comparison: Comparison) -> Preset:
    return next(iter(task_named(comparison.task).presets.values()))


def build(trial: Trial) -> Any:
    """The method with the trial's rates and the preset's other settings."""
    comparison, tuned = COMPARISONS[trial.comparison], METHODS[trial.method]
    named = NAMED[tuned.method or trial.method]
    plain = dataclasses.replace(
        find_preset(comparison).hyperparameters,
        server_optimizer="sgd",
        server_learning_rate=1.0,
        server_momentum=0.0,
        burn_in_rounds=0,
    )
    chosen: dict[str, Any] = {
        "client_learning_rate": trial.client_rate,
        "client_momentum": 0.0 if trial.method == "mime" else comparison.client_momentum,
        tuned.setting: trial.server,
        **tuned.fixed,
    }
    h: Hyperparameters = dataclasses.replace(named.defaults(plain), **chosen)
    return named.build(resolve_hyperparameters(named.adjust(h)))


def list_kinds(trial: Trial) -> Sequence[str]:
    """What the trial or run is measured on."""
    return ("trial",) if trial.kind == "trial" else COMPARISONS[trial.comparison].run_kinds


def run(trial: Trial, data_dir: str | None) -> Table:
    comparison, problem = COMPARISONS[trial.comparison], load(trial.comparison, data_dir)
    is_trial, key = trial.kind == "trial", jax.random.key(trial.seed)
    kinds = list_kinds(trial)

    def evaluate(params: Any) -> dict[str, float]:
        values = {
            kind: evaluator(trial.comparison, kind, data_dir)(params).values for kind in kinds
        }
        return {f"{kind} {name}": x for kind in kinds for name, x in values[kind].items()}

    result = fedpa.fit(
        problem.objective,
        train_start(trial.comparison, data_dir) if comparison.start else problem.init(key),
        problem.clients,
        build(trial),
        rounds=comparison.rounds // 2 if is_trial else comparison.rounds,
        clients_per_round=CLIENTS,
        seed=trial.seed,
        evaluate=evaluate,
        eval_every=comparison.eval_every,
        progress=False,
    )
    metric = task_named(comparison.task).metric
    measured: Table = {trial._replace(kind=kind): [] for kind in kinds}
    up, total = 0.0, 0.0
    for record, seconds in zip(result.history, exclude_compiling(result.history), strict=True):
        up += record["comm/bytes_up"] / 1e6
        total += seconds
        for one, points in measured.items():
            if (value := record.get(f"eval/{one.kind} {metric}")) is not None:
                loss = record[f"eval/{one.kind} loss"]
                points.append(Point(record["round"], value, loss, up, total))
    return {one: [summarize(points)] if is_trial else points for one, points in measured.items()}


def time_rounds(name: str, rounds: int, table: Table, data_dir: str | None) -> dict[str, float]:
    """Measure a round's seconds with each method's best rates: the median of turns' means."""
    problem = load(name, data_dir)
    means: dict[str, list[float]] = {method: [] for method in COMPARISONS[name].servers}
    for seed, method in itertools.product(range(TURNS), means):
        result = fedpa.fit(
            problem.objective,
            problem.init(jax.random.key(seed)),
            problem.clients,
            build(best(table, name, method)),
            rounds=rounds,
            clients_per_round=CLIENTS,
            seed=seed,
            progress=False,
        )
        means[method].append(float(np.mean(exclude_compiling(result.history))))
    return {method: float(np.median(of_turns)) for method, of_turns in means.items()}


def exclude_compiling(history: Sequence[Mapping[str, Any]]) -> list[float]:
    """The seconds of each round, without compiling.

    A phase's first round compiles: it is given the median of the phase's other rounds.
    """
    phases: dict[str, list[float]] = {}
    for record in history:
        phases.setdefault(record["phase"], []).append(record["seconds"])
    for seconds in phases.values():
        seconds[0] = float(np.median(seconds[1:] or seconds))
    left = {phase: iter(seconds) for phase, seconds in phases.items()}
    return [next(left[record["phase"]]) for record in history]


def summarize(points: Sequence[Point]) -> Point:
    """The mean of the last evaluations."""
    last = points[-max(1, math.ceil(SHARE * len(points))) :]
    accuracy, loss = (float(np.mean([getattr(p, n) for p in last])) for n in ("accuracy", "loss"))
    return points[-1]._replace(accuracy=accuracy, loss=loss)


def trials(name: str, method: str) -> Iterator[Trial]:
    comparison = COMPARISONS[name]
    for rate, server in itertools.product(comparison.client_rates, comparison.servers[method]):
        yield Trial(name, method, "trial", rate, server, TRIAL_SEED)


def best(table: Table, name: str, method: str) -> Trial:
    """The trial of the least validation loss, or best metric; one that is not finite is none."""
    tried = {one: table[one][0] for one in trials(name, method) if one in table}

    def cost(one: Trial) -> float:
        end = tried[one]
        value = end.loss if COMPARISONS[name].chosen_by == "loss" else -end.accuracy
        return value if math.isfinite(value) else math.inf

    return min(tried, key=cost)


def compare(name: str, path: Path, data_dir: str | None) -> None:
    """Run what the table lacks."""
    for method in COMPARISONS[name].servers:
        for trial in trials(name, method):
            carry_out(trial, path, data_dir)
    for seed in range(COMPARISONS[name].seeds):
        for method in COMPARISONS[name].servers:
            chosen = best(read(path), name, method)
            carry_out(chosen._replace(kind="run", seed=seed), path, data_dir)


def carry_out(trial: Trial, path: Path, data_dir: str | None) -> None:
    table = read(path)
    if all(trial._replace(kind=kind) in table for kind in list_kinds(trial)):
        return
    began = time.perf_counter()
    measured = run(trial, data_dir)
    seconds = time.perf_counter() - began
    append(path, measured)
    for one, points in measured.items():
        end = summarize(points)
        print(*one, f"{end.accuracy:.4f} {end.loss:.4f} {seconds:.0f} s", flush=True)


def reach(points: Sequence[Point], target: float) -> Point | None:
    """The first evaluation that reaches the target."""
    return next((point for point in points if point.accuracy >= target), None)


OURS = "global-precision"


def compare_seeds(ours: Mapping[int, float], theirs: Mapping[int, float]) -> str:
    """Our mean lead over the seeds in common, with half of its 95 % interval (Student's t)."""
    pairs = np.array([ours[seed] - theirs[seed] for seed in ours if seed in theirs])
    if len(pairs) < 2:
        return "–"
    half = scipy.stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / math.sqrt(len(pairs))
    return f"{pairs.mean():+.4f} ± {half:.4f}"


def describe_target(runs: Sequence[Sequence[Point]], target: float) -> str:
    """Rounds and megabytes that it took on average; how many runs came there if not all did."""
    there = [point for points in runs if (point := reach(points, target)) is not None]
    if len(there) < len(runs):
        return f"{len(there)} of {len(runs)}"
    rounds, megabytes = (np.mean([getattr(p, f) for p in there]) for f in ("round", "megabytes"))
    return f"{rounds:.0f}, {megabytes:.0f} MB"


Runs = dict[str, dict[Trial, list[Point]]]
"""By method."""


def group_runs(table: Table) -> dict[tuple[str, str], Runs]:
    """The runs of each comparison, by what they are measured on."""
    groups: dict[tuple[str, str], Runs] = {}
    for trial, points in table.items():
        if trial.kind != "trial":
            runs = groups.setdefault((trial.comparison, trial.kind), {})
            runs.setdefault(trial.method, {})[trial] = points
    return groups


def show(table: Table) -> None:
    """Print a table of each comparison: results, and what it took to reach the targets."""
    for (name, kind), runs in group_runs(table).items():
        targets = COMPARISONS[name].targets
        heads = [
            "method",
            "rates",
            "accuracy",
            "lead of ours",
            "loss",
            *(f"to {t:g}" for t in targets),
        ]
        print(
            f"\n## {name}, {kind}\n",
            "| " + " | ".join(heads) + " |",
            "| --- " * len(heads) + "|",
            sep="\n",
        )
        ends = {m: {t.seed: summarize(p) for t, p in ran.items()} for m, ran in runs.items()}
        accuracies = {m: {s: end.accuracy for s, end in of.items()} for m, of in ends.items()}
        for method, ran in runs.items():
            values = np.array(list(accuracies[method].values()))
            spread = f" ± {values.std(ddof=1):.4f}" if len(values) > 1 else ""
            ours = accuracies.get(OURS, {})
            lead = "" if method == OURS else compare_seeds(ours, accuracies[method])
            loss = np.mean([end.loss for end in ends[method].values()])
            rates = next(iter(ran))
            chosen = f"{rates.client_rate:g}, {rates.server:g}"
            cells = [method, chosen, f"{values.mean():.4f}{spread}", lead, f"{loss:.3f}"]
            cells += [describe_target(list(ran.values()), target) for target in targets]
            print("| " + " | ".join(cells) + " |")


def draw(table: Table) -> Figure:
    """A panel for each comparison: the metric by MB of upload, mean and range over seeds."""
    groups = group_runs(table)
    looks = choose_looks({method: method if method in NAMED else None for method in METHODS})
    across = 2
    down = -(-len(groups) // across)
    figure = new_figure(5.0 * across, 3.4 * down)
    for place, ((name, kind), methods) in enumerate(groups.items(), start=1):
        axes = figure.add_subplot(down, across, place)
        ends = []
        for method, runs in methods.items():
            curves = runs.values()
            values = np.array([[point.accuracy for point in points] for points in curves])
            sent = np.mean([[point.megabytes for point in points] for points in curves], axis=0)
            style = style_line(looks[method]) | {"markevery": max(1, len(sent) // 6)}
            axes.plot(
                sent,
                values.mean(axis=0),
                label=method,
                markersize=4,
                lw=1 + (method == OURS),
                **style,
            )
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(sent, low, high, color=style["color"], alpha=0.15, lw=0)
            ends += [low[-1], high[-1]]
        axes.set_ylim(0.85 * min(ends), 1.02 * max(ends))
        metric, title = task_named(COMPARISONS[name].task).metric, COMPARISONS[name].title
        if kind == "validation":
            title += ", validation clients"
        tidy(axes, title, "MB of upload, all clients", metric.replace("_", " "))
        axes.legend(fontsize=6, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparison", nargs="?", choices=COMPARISONS)
    parser.add_argument("table", type=Path)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--figure", type=Path, help="PNG file to draw the curves in")
    parser.add_argument("--seconds", type=int, metavar="N", help="time N rounds of each method")
    given = parser.parse_args()
    fedpa.configure()
    if given.comparison and given.seconds:
        seconds = time_rounds(given.comparison, given.seconds, read(given.table), given.data_dir)
        for method, value in seconds.items():
            print(f"{method}: {value:.4g} s a round, {value / min(seconds.values()):.2f}×")
        return
    if given.comparison:
        compare(given.comparison, given.table, given.data_dir)
    table = read(given.table)
    show(table)
    if given.figure:
        given.figure.write_bytes(render_figure(draw(table), "png"))


if __name__ == "__main__":
    main()
