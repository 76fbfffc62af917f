"""The switch at the plateau: figure 2 of the paper, with the controls it lacks.

FedAvg runs until its training loss stops falling, by the rule of `--burn-in-rounds auto`, or to a
bound. All branches of a seed begin there and run 60 more rounds (CIFAR-100: 80). FedPA's samples
are means of iterates, and the mean of a round's iterates is a shorter step than the last one; so
the controls are FedAvg with lower server rates, one of them lower by just that ratio, ‖θ₀ − x̄‖ /
‖θ₀ − θ_K‖ as the first round after the switch measures it.

FedPA's ρ is tuned on the loss of validation clients over the branch's last rounds, with cohorts of
a seed that is not compared; FedAvg's lower rate with which FedPA is compared is the one that is
best there, too. A lower rate also shortens what the server's momentum has gathered, at once;
shorter deltas do so within some rounds. All branches of a seed meet the same clients in the same
rounds, except MIME and global precision: they have a server of their own, begin with θ alone, and
their rounds are counted from there. SGLD samples at T = 0.01: with √n_i, S is about 0.01 A⁻¹.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedpa.algorithms.plateau import Plateau
from fedpa.experiments.config import RunConfig, default_config, resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.bootstrap import band_of_mean, interval_of_mean
from fedpa.experiments.report.curves import Curve, compute_running_average
from fedpa.experiments.report.figures import new_figure, tidy
from fedpa.experiments.report.looks import Look, choose_looks, style_line
from fedpa.experiments.run import run
from fedpa.experiments.studies.study import (
    Row,
    Settings,
    Study,
    draw_line,
    make_rows,
    make_table,
    split,
    where,
)
from fedpa.experiments.tasks.task import task_named
from fedpa.training.callbacks import AT_PLATEAU, stop_at_plateau
from fedpa.training.history import History
from fedpa.training.problem import Problem

PLATEAU = 50
"""Rounds whose mean training loss must not be lower than that of the 50 before: see `Plateau`."""
EARLY = 10
"""Rounds within which the loss drops."""
WINDOW = 10
"""Rounds of the running averages, and of the loss before the switch."""
LAST = 20
"""Rounds at the end that are averaged."""
RHOS = (0.001, 0.01, 0.1, 1.0)
"""Candidates for FedPA's ρ."""
TUNING = 1_000_000
"""Added to the seed of the runs that choose ρ."""


class Branch(NamedTuple):
    """A run after the switch."""

    method: str
    settings: Mapping[str, Any] = {}
    is_fresh: bool = False
    """Whether it begins with θ alone."""


FEDAVG, TUNED = "FedAvg", "FedPA, ρ tuned"
HALF, QUARTER, MATCHED = "FedAvg × 0.5", "FedAvg × 0.25", "FedAvg × r"
BRANCHES = {
    FEDAVG: Branch("fedavg"),
    HALF: Branch("fedavg", {"at_switch_rate": 0.5}),
    QUARTER: Branch("fedavg", {"at_switch_rate": 0.25}),
    "mean": Branch("mean"),
    MATCHED: Branch("fedavg"),
    "mean-scaled": Branch("mean-scaled"),
    "FedPA": Branch("fedpa"),
    TUNED: Branch("fedpa"),
    "FedPA, SGLD": Branch("fedpa", {"sampler": "sgld", "sample_scale": "sqrt-n"}),
    "FedAvg[1]": Branch("fedavg-1"),
    "MIME": Branch("mime", is_fresh=True),
    "global precision": Branch("global-precision", is_fresh=True),
}
"""In the order in which they run: a control's rate needs FedAvg's and the mean's first round."""
CUTS = (HALF, QUARTER, MATCHED)
FEW = (FEDAVG, HALF, "mean", MATCHED, "FedPA", "global precision")
MANY = (FEDAVG, HALF, QUARTER, "mean", MATCHED, "mean-scaled", "FedPA", "global precision")


class Federation(NamedTuple):
    """A problem as it is trained."""

    task: str
    title: str
    options: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    """Where they differ from the preset's."""
    at_most: int = 500
    """Rounds after which the switch comes without a plateau, too."""
    at_least: int = 0
    seeds: int = 5
    has_one_burn_in: bool = False
    """Whether all seeds begin after the first seed's burn-in."""
    rounds: int = 60
    """After the switch."""
    eval_every: int = 1
    """Before the switch; every round is evaluated after it."""
    branches: Sequence[str] = tuple(BRANCHES)
    clients: int = 10
    of_branches: Mapping[str, Mapping[str, Any]] = {}
    """Branch → settings that it needs on this problem."""


DIGITS = {"dataset": "fed_emnist_digitsonly", "validation_share": 0.1, "eval_examples": 4000}
SKEW = {**DIGITS, "label_skew": 0.1}
WRITERS = Federation(
    "emnist",
    "digits by writer, CNN, M = 5",
    {**DIGITS, "model": "cnn", "eval_examples": 2000, "max_examples": 40},
    {"epochs": 5},
    seeds=3,
    eval_every=5,
    branches=MANY,
)
PLAIN = {"client_momentum": 0.0, "server_learning_rate": 1.0, "server_momentum": 0.0}
PROBLEMS = {
    "digits": Federation(
        "digits", "8×8 digits, M = 5", {"validation_share": 0.1}, at_most=400, clients=20
    ),
    "logistic": Federation(
        "emnist",
        "label-skewed digits, logistic regression, M = 20",
        {**SKEW, "model": "logistic"},
        {**PLAIN, "epochs": 20, "client_learning_rate": 0.3},
        at_most=1000,
    ),
    "mlp": Federation(
        "emnist",
        "label-skewed digits, perceptron, M = 10",
        {**SKEW, "model": "mlp"},
        {
            "epochs": 10,
            "client_learning_rate": 0.3,
            "client_momentum": 0.0,
            "server_learning_rate": 0.1,
            "server_momentum": 0.9,
        },
        at_most=1000,
    ),
    "cnn": WRITERS,
    "cnn-20": WRITERS._replace(
        title="digits by writer, CNN, M = 20", settings={"epochs": 20}, seeds=1
    ),
    "cifar100": Federation(
        "cifar100",
        "CIFAR-100, small ResNet, M = 10",
        {"model": "small-resnet", "validation_share": 0.1, "eval_examples": 2000},
        {"epochs": 10},
        at_least=400,
        at_most=400,
        seeds=2,
        has_one_burn_in=True,
        rounds=80,
        eval_every=5,
        branches=FEW,
    ),
    "tags": Federation(
        "stackoverflow-lr",
        "tags, bag of words, M = 5",
        {"vocabulary": 2000, "eval_examples": 4000},
        {"iterate_averaging": "none"},
        seeds=3,
        eval_every=5,
        of_branches={"global precision": {"precision_length": 40.0}},
    ),
}
QUICK = "digits"
BOUNDS = {own.at_least for own in PROBLEMS.values() if own.at_least == own.at_most}
"""Switches that no rule decides."""


# --- measuring ---


def measure(settings: Settings) -> list[Row]:
    """Measure what is missing: all rows, with those of earlier calls."""
    rows = list(settings.kept)
    names = [QUICK] if settings.quick else settings.problems or tuple(PROBLEMS)
    wanted = [(name, seed) for name in names for seed in _list_seeds(PROBLEMS[name], settings)]
    for place, (name, seed) in enumerate(wanted):
        own, out = PROBLEMS[name], settings.runs / f"{name}-{seed}"
        if where(rows, problem=own.title, run=seed, quantity="done"):
            continue

        def tell(text: str, done: float = place / len(wanted), name: str = name) -> None:
            settings.tell(done, f"{name}: {text}")

        rows += [
            row | {"run": seed} for row in _measure_seed(name, seed, settings.seed, rows, out, tell)
        ]
        rows += make_rows({"problem": own.title, "run": seed}, {"done": 1.0})
        settings.keep(rows)
    return rows


def _list_seeds(own: Federation, settings: Settings) -> range:
    return range(settings.seed, settings.seed + (settings.repeats or own.seeds))


@functools.lru_cache(maxsize=1)
def _load(title: str) -> Problem:
    (own,) = (own for own in PROBLEMS.values() if own.title == title)
    return task_named(own.task).load(configure(own, FEDAVG, 0, 0, "").task_options)


def _measure_seed(
    name: str, seed: int, first_seed: int, rows: Sequence[Row], out: Path, tell: Any
) -> Iterator[Row]:
    """Train to the plateau, then every branch."""
    own = PROBLEMS[name]
    of_burn_in = first_seed if own.has_one_burn_in else seed
    shared = out.parent / f"{name}-{of_burn_in}-burn-in"
    first = configure(own, FEDAVG, of_burn_in, 0, "")
    problem = _load(own.title)
    tell(f"seed {seed}, FedAvg to its plateau")
    before = run(
        resolve(dataclasses.replace(first, rounds=own.at_most, eval_every=own.eval_every)),
        shared,
        resuming=True,
        callbacks=[
            stop_at_plateau(Plateau(window=PLATEAU, at_least=own.at_least, at_most=own.at_most))
        ],
        problem=problem,
    )
    switch = len(before.history)
    is_plateau = before.stopped == AT_PLATEAU and switch < own.at_most
    about: Row = {"problem": own.title, "branch": FEDAVG}
    yield from make_rows(about, {"switch": switch, "plateau": float(is_plateau)})
    yield from _read(about, before.history, switch, first=-own.rounds)

    def train(label: str, place: str, seed: int, **more: Any) -> History:
        tell(f"seed {seed}, {label}")
        config = resolve(replace_fields(configure(own, label, seed, switch, str(shared)), **more))
        from_here = None if BRANCHES[label].is_fresh else shared
        return run(config, out / place, resuming=True, problem=problem, branch=from_here).history

    lengths: dict[str, float] = {}
    for place, label in enumerate(own.branches):
        more: dict[str, Any] = {}
        about = {"problem": own.title, "branch": label}
        if label == MATCHED:
            more["at_switch_rate"] = lengths["mean"] / lengths[FEDAVG]
            yield from make_rows(about, {"rate": more["at_switch_rate"]})
        if label == TUNED:
            chosen = [row["value"] for row in where(rows, problem=own.title, quantity="rho")]
            if not chosen:
                values = {}
                for rho in RHOS:
                    history = train(label, f"rho-{rho:g}", seed + TUNING, rho=rho)
                    values[rho] = _average(history, switch + own.rounds - LAST)
                    yield from make_rows(about | {"rho": rho}, {"trial": values[rho]})
                chosen = [min(values, key=lambda rho: _or_infinite(values[rho]))]
            more["rho"] = chosen[0]
            yield from make_rows(about, {"rho": chosen[0]})
        history = train(label, f"branch-{place}", seed, **more)
        start = 0 if BRANCHES[label].is_fresh else switch
        lengths[label] = history[start]["train/delta_norm"]
        validation = _average(history, start + own.rounds - LAST)
        yield from make_rows(about, {"validation": validation})
        yield from _read(about, history, start, first=0)


def configure(own: Federation, label: str, seed: int, switch: int, shared: str) -> RunConfig:
    """Configure a branch that begins after round `switch` of the run in `shared`."""
    branch = BRANCHES[label]
    base = default_config(own.task, "fedavg")
    h = dataclasses.replace(base.hyperparameters, burn_in_rounds=0, **own.settings)
    if branch.is_fresh:
        h = METHODS[branch.method].defaults(h)
    else:
        h = dataclasses.replace(h, burn_in_rounds=switch)
    if "sampler" in branch.settings:  # it has no momentum, and a rate as long as with it
        rate = h.client_learning_rate / (1 - h.client_momentum)
        h = dataclasses.replace(h, client_learning_rate=rate, client_momentum=0.0)
    return dataclasses.replace(
        base,
        method=branch.method,
        seed=seed,
        rounds=own.rounds + (0 if branch.is_fresh else switch),
        init=shared if branch.is_fresh else None,
        eval_every=1,
        clients_per_round=own.clients,
        hyperparameters=dataclasses.replace(h, **branch.settings, **own.of_branches.get(label, {})),
        task_options=dataclasses.replace(base.task_options, **own.options, eval_split="test"),
        test_at_end=False,
        recording=dataclasses.replace(base.recording, keep_checkpoints=1),
    )


def _read(about: Row, history: History, switch: int, first: int) -> Iterator[Row]:
    """The evaluations, by rounds after the switch."""
    for record in history:
        place = record["round"] - switch
        if place > first and "eval/loss" in record:
            metric = next(x for x in ("accuracy", "recall_at_5") if f"eval/{x}" in record)
            values = {"loss": record["eval/loss"], "metric": record[f"eval/{metric}"]}
            yield from make_rows(about | {"round": place}, values)


def _average(history: History, after: int) -> float:
    """The loss of validation clients after a round."""
    name = "valid/loss"
    return float(np.mean([r[name] for r in history if r["round"] > after and name in r]))


def _or_infinite(value: float) -> float:
    return value if np.isfinite(value) else np.inf


# --- what the rows say ---


class Outcome(NamedTuple):
    """A branch's numbers, by seed."""

    drop: dict[int, float]
    """Loss before the switch less that of rounds 6 to 10 after it."""
    loss: dict[int, float]
    """Mean of the last rounds."""
    metric: dict[int, float]
    validation: dict[int, float]
    """Loss of validation clients in the last rounds."""


def find_outcomes(rows: Sequence[Row]) -> dict[str, Outcome]:
    """Each branch's drop, final loss and final metric, of one problem's rows."""
    outcomes: dict[str, Outcome] = {}
    curves = where(rows, quantity="loss")
    last = max((row["round"] for row in curves), default=0)
    for name, own in split([row for row in rows if "round" in row], "branch").items():
        validation = where(rows, branch=name, quantity="validation")
        outcome = Outcome({}, {}, {}, {row["run"]: row["value"] for row in validation})
        for seed, of_seed in split(own, "run").items():
            after = [row for row in of_seed if row["round"] > 0]
            if not after:
                continue
            before = [
                row["value"]
                for row in where(curves, branch=FEDAVG, run=seed)
                if -WINDOW < row["round"] <= 0
            ]
            losses = where(after, quantity="loss")
            early = [r["value"] for r in losses if EARLY // 2 < r["round"] <= EARLY]
            end = [row for row in after if row["round"] > last - LAST]
            outcome.drop[seed] = float(np.mean(before) - np.mean(early))
            for quantity, values in (("loss", outcome.loss), ("metric", outcome.metric)):
                values[seed] = float(np.mean([r["value"] for r in where(end, quantity=quantity)]))
        outcomes[name] = outcome
    return {name: outcomes[name] for name in BRANCHES if name in outcomes}


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[float, float]:
    """The mean difference paired by seed, and half its 95 % interval (infinite for one seed)."""
    paired = [one[seed] - other[seed] for seed in one if seed in other]
    interval = interval_of_mean(paired)
    return float(np.mean(paired)), np.inf if interval is None else interval.half


def draw(rows: Sequence[Row]) -> Figure:
    """For each problem: loss of what explains the drop, loss of other methods, the metric."""
    problems = split(rows, "problem")
    figure = new_figure(15.0, 4.4 * len(problems))
    grid = figure.subplots(len(problems), 3, squeeze=False)
    looks = choose_looks({name: branch.method for name, branch in BRANCHES.items()})
    explain = (FEDAVG, *CUTS, "mean", "mean-scaled", "FedPA", TUNED)
    others = (FEDAVG, HALF, "FedAvg[1]", "FedPA, SGLD", "MIME", "global precision")
    for (left, middle, right), (title, own) in zip(grid, problems.items(), strict=True):
        _draw_panel(left, own, "loss", explain, looks)
        tidy(left, f"{title}: FedAvg, its rates, FedPA", "rounds after the switch", "test loss")
        _draw_panel(middle, own, "loss", others, looks)
        tidy(middle, "other methods", "rounds after the switch", "test loss")
        _draw_panel(right, own, "metric", [*dict.fromkeys((*explain, *others))], looks)
        label = "recall@5" if title.startswith("tags") else "accuracy"
        tidy(right, "all", "rounds after the switch", f"test {label}")
        for axes in (left, middle):
            axes.legend(fontsize=6.5, frameon=False)
    return figure


def _draw_panel(
    axes: Axes, rows: Sequence[Row], quantity: str, names: Sequence[str], looks: Mapping[str, Look]
) -> None:
    """Running averages of ten rounds of each seed, their mean and 95 % band; crosses are rounds."""
    shown: list[float] = []
    before = _read_curves(where(rows, branch=FEDAVG, quantity=quantity))
    for name in names:
        found = _read_curves(where(rows, branch=name, quantity=quantity))
        if not found:
            continue
        # Before the switch all are FedAvg; rounds that every seed has.
        curves = [
            {t: value for t, value in before[seed].items() if t <= 0} | own
            for seed, own in found.items()
        ]
        rounds = np.array(sorted(set.intersection(*map(set, curves))))
        values = np.array([[own[t] for t in rounds] for own in curves])
        smooth = np.array(
            [compute_running_average(Curve(rounds, own), WINDOW).values for own in values]
        )
        seen = rounds >= (rounds[0] if name == FEDAVG else 0)
        rounds, values, smooth = rounds[seen], values[:, seen], smooth[:, seen]
        colour = style_line(looks[name])["color"]
        axes.plot(rounds, values.mean(axis=0), "x", ms=2, alpha=0.3, color=colour)
        draw_line(axes, rounds, smooth.mean(axis=0), band_of_mean(smooth), looks[name], name)
        shown += [*smooth[np.isfinite(smooth)]]
    axes.axvline(0, color="0.5", linewidth=0.8, linestyle=":")
    # FedAvg's own range, and beyond it what is better: a branch may leap far to the other side.
    own = [row["value"] for row in where(rows, branch=FEDAVG, quantity=quantity)]
    low, high = min(own), max(own)
    low, high = (min(low, *shown), high) if quantity == "loss" else (low, max(high, *shown))
    axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))


def _read_curves(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """Seed → round → value."""
    by_seed = split([row for row in rows if "round" in row], "run")
    return {seed: {r["round"]: r["value"] for r in own} for seed, own in by_seed.items()}


def findings(rows: Sequence[Row]) -> list[Table | str]:
    """A table for each problem, and one sentence that is computed from it."""
    found: list[Table | str] = []
    for title, own in split(rows, "problem").items():
        outcomes = find_outcomes(own)
        seeds = len(outcomes[FEDAVG].loss)
        lines = []
        for name, outcome in outcomes.items():
            more = [difference(outcome.loss, outcomes[FEDAVG].loss)] if name != FEDAVG else []
            more += [difference(outcome.metric, outcomes[FEDAVG].metric)] if more else []
            lines.append(
                [
                    name + _describe_setting(own, name),
                    f"{np.mean([*outcome.drop.values()]):+.4f}",
                    f"{np.mean([*outcome.loss.values()]):.4f}",
                    f"{np.mean([*outcome.metric.values()]):.4f}",
                    *(_format(*pair) for pair in more or [(0.0, 0.0)] * 2),
                ]
            )
        columns = ["branch", "drop", "loss", "metric", "Δ loss", "Δ metric"]
        heading = f"{title}\n{_describe_switch(own, seeds)}"
        found.append(make_table(heading, columns, lines, left=["branch"]))
        found.append(conclude(outcomes))
    found.append(
        f"Drop: test loss of the {WINDOW} rounds before the switch less that of rounds "
        f"{EARLY // 2 + 1} to {EARLY} after it. Loss and metric: means of the last {LAST} rounds. "
        "Δ: difference from FedAvg as before, paired by seed, ± half a 95 % interval. "
        "r = ‖θ₀ − x̄‖/‖θ₀ − θ_K‖, the mean of iterates as a share of FedAvg's step. "
        "MIME and global precision meet the clients of other rounds."
    )
    return found


def conclude(outcomes: Mapping[str, Outcome]) -> str:
    """Say whether FedPA's loss drops, and whether a lower rate of FedAvg gives the same."""
    name = TUNED if TUNED in outcomes else "FedPA"
    if not all(map(np.isfinite, outcomes[name].loss.values())):
        return f"{name} diverged."
    cuts = {label: outcomes[label].validation for label in CUTS if label in outcomes}
    best = min(cuts, key=lambda label: _or_infinite(float(np.mean([*cuts[label].values()]))))
    drop = difference(outcomes[name].drop, outcomes[FEDAVG].drop)
    rest = difference(outcomes[name].loss, outcomes[best].loss)
    is_there = "falls" if drop[0] > 0 else "rises"
    is_less = "below" if rest[0] < 0 else "above"
    return (
        f"{name}: at the switch the test loss {is_there} by {_format_size(*drop)} compared with "
        f"FedAvg as before{_judge(*drop)}; at the end it is {_format_size(*rest)} {is_less} that "
        f"of {best}, the lower rate that validation clients prefer{_judge(*rest)}."
    )


def _format_size(value: float, half: float) -> str:
    return f"{abs(value):.4f}" + (f" ± {half:.4f}" if np.isfinite(half) else "")


def _judge(value: float, half: float) -> str:
    if not np.isfinite(half):
        return " (one seed)"
    return "" if abs(value) > half else ", within seed noise"


def _format(value: float, half: float) -> str:
    if value == half == 0:
        return "–"
    return f"{value:+.4f}" + (f" ± {half:.4f}" if np.isfinite(half) else "")


def _describe_setting(rows: Sequence[Row], name: str) -> str:
    for quantity, text in (("rate", "r = {:.2f}"), ("rho", "ρ = {:g}")):
        values = [row["value"] for row in where(rows, branch=name, quantity=quantity)]
        if values:
            return f" ({text.format(np.mean(values))})"
    return ""


def _describe_switch(rows: Sequence[Row], seeds: int) -> str:
    rounds = [int(row["value"]) for row in where(rows, quantity="switch")]
    fired = [bool(row["value"]) for row in where(rows, quantity="plateau")]
    text = f"{seeds} seed{'s' if seeds != 1 else ''}, switch after round "
    text += f"{min(rounds)}" if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
    late = fired.count(False)
    if max(rounds) == min(rounds) in BOUNDS:
        return text + ", fixed; intervals are of what follows it"
    return text + (f" ({late} of {seeds} at the bound, without a plateau)" if late else "")


STUDY = Study(
    summary="figure 2, with controls: the switch at the plateau",
    columns=("problem", "branch", "run", "round", "rho"),
    knob="seeds",
    repeats=(0, 2),
    measure=measure,
    draw=draw,
    findings=findings,
    problems=tuple(PROBLEMS),
)
