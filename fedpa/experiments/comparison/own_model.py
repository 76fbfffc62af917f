"""`fedpa.compare`: compare methods on your own model and data, as `fedpa compare` on a task."""

import contextlib
import dataclasses
import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from rich.console import Console

from fedpa.algorithms.methods import Described, Method
from fedpa.data.federated import FederatedData
from fedpa.engines.engine import Engine, OfAlgorithm
from fedpa.engines.local import local
from fedpa.errors import FedpaError, check_integer, check_number, refuse
from fedpa.experiments.comparison.comparison import (
    SEED,
    Choice,
    Deciding,
    Entry,
    Plan,
    Settings,
    carry_out,
    check_plan,
    list_points,
    remember,
    run_in_turn,
)
from fedpa.experiments.comparison.display import make_choices_table, show_runs, write_report
from fedpa.experiments.comparison.own_run import Assembly, OwnRun, Setup
from fedpa.experiments.comparison.splits import (
    Measure,
    choose_metric,
    make_evaluation,
    split_clients,
)
from fedpa.experiments.report import comparison as report
from fedpa.experiments.report.conclusions import conclude
from fedpa.experiments.report.curves import WINDOW, Scale
from fedpa.experiments.report.live import LINES
from fedpa.experiments.report.runs import find_runs, group_runs
from fedpa.experiments.report.tables import make_records, make_table
from fedpa.objectives.objective import Objective
from fedpa.training import run_directory
from fedpa.training.callbacks import Best, Evaluate, is_lower
from fedpa.training.loop import Fit, check_counts, check_share
from fedpa.types import Loss

MADE_BY = "fedpa.compare"
OBJECTIVE = "objective"
"""The parameter that distinguishes a user's method from a function of settings."""
Builder = Callable[..., Method]
"""Tuned settings → the method."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """The result of a comparison; `print` shows its table."""

    table: Sequence[Mapping[str, Any]]
    """One record per method, as in `table.csv`: the metric's mean over seeds with the ends of its
    interval (`accuracy`, `accuracy_low`, `accuracy_high`), the difference from the reference,
    paired by seed (`difference`, …), rounds to each target, seconds, bytes. None if there is no
    number."""
    fits: Mapping[str, Mapping[int, Fit]]
    """Label → seed → the run's result."""
    chosen: Mapping[str, Choice]
    """Label → the tuned settings (`chosen[label].best.settings`) and all trials."""
    out: Path | None
    """The directory that records it, or None."""
    results: report.Comparison
    """The numbers behind table, curves and page."""

    def __repr__(self) -> str:
        """Format the chosen settings and the table."""
        console = Console(color_system=None, force_jupyter=False)
        with console.capture() as capture:
            if self.chosen:
                console.print(make_choices_table(self.chosen))
            console.print(make_table(self.results))
            for sentence in conclude(self.results):
                console.print(sentence, markup=False, highlight=False)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def compare(
    methods: Mapping[str, Method | Builder],
    loss: Loss | Objective,
    params: Any,
    clients: Mapping[Any, Any] | FederatedData,
    *,
    rounds: int,
    clients_per_round: int,
    seeds: int | Sequence[int] = 1,
    seed: int = 0,
    tune: Mapping[str, Sequence[Any]] | None = None,
    validation: float | Mapping[Any, Any] | FederatedData | None = None,
    test: Mapping[Any, Any] | FederatedData | None = None,
    metrics: Mapping[str, Measure] | None = None,
    evaluate: Evaluate | None = None,
    eval_every: int = 1,
    by: str | Best | None = None,
    reference: str | None = None,
    targets: Sequence[float] = (),
    engine: Engine | OfAlgorithm | None = None,
    min_success: float = 0.0,
    out: str | Path | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare methods on your own model and data, as `fedpa compare` does on a task.

    With one seed all methods use the same cohorts and the same randomness, so differences are
    paired by seed. Burn-in rounds that several methods share (those of FedPA and its controls, and
    of FedAvg) are run once; this changes no number. With `tune`, each method runs with the settings
    that are best on the validation clients, found by runs of as many rounds with a seed that is not
    compared. If one setting is tuned and its best value is at an end of the list, the list is
    extended by the same factor, up to three times; for several settings the full grid is tried.

    Args:
        methods: Label → a method (`fedpa.fedavg(local, server)`, or a function of one argument
            named `objective`), or a function of tuned settings that returns one: the names of its
            parameters select settings of `tune`; those without a default must be in `tune`.
        loss: `loss(params, batch, key)`, one number per example, or a `fedpa.Objective`.
        params: The initial parameters of all runs: any pytree.
        clients: Client id → arrays (first axis = examples), or a `FederatedData`.
        rounds: Rounds of each run.
        clients_per_round: Clients in each round.
        seeds: Number of runs per method, with seeds `seed`, `seed` + 1, …; or a list of seeds,
            `[0, 3, 7]`.
        seed: The first seed, if `seeds` is a number.
        tune: Setting → at least two values to try: numbers or strings.
        validation: The clients on which settings are chosen: a share of `clients`, which then do
            not train (drawn by NumPy's generator with seed 0 from the sorted ids, so the same for
            every seed), or separate clients. Loss and `metrics` are recorded as `valid/<name>`.
        test: Clients that the curves and the table show. Default: the validation clients.
        metrics: Name → `f(params, batch)`, one number per example; means over examples are shown.
        evaluate: A function of the parameters that returns further metrics by name.
        eval_every: Rounds between evaluations.
        by: The metric for tuning and for the table. Default: the first of `metrics`, otherwise the
            loss. Lower is better for names like loss, error, mse; for others use
            `fedpa.Best(name, lower=…)`.
        reference: The label that differences refer to. Default: the first FedAvg, otherwise the
            first method.
        targets: Values of that metric. The table shows the rounds until the average over the last
            10 rounds (before round 10, over all so far) reaches them.
        engine: Where clients run. Default: `fedpa.engines.local()`.
        min_success: The share of a round's clients that must succeed for a run to continue.
        out: The directory that records it: `table.csv`, `table.tex`, `curves.png`, `report.html`,
            a directory per run. If it contains this comparison, that is continued: finished runs
            are kept, interrupted runs resumed, missing runs started. Other settings are refused
            before anything is written; `evaluate` and `metrics` are compared by name only. Default:
            nothing is recorded.
        progress: Whether to show runs on stderr: a bar each on a terminal, elsewhere about ten
            lines, at least one per run.
    Returns:
        A `Comparison`: `print(comparison)` shows the table.
    Raises:
        FedpaError: An argument is invalid, or the directory contains something else.

    Example:
        >>> import numpy as np, fedpa
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(8, 20, 2)).astype(np.float32)
        >>> clients = {f"client-{i}": {"x": x[i], "y": x[i, :, 0]} for i in range(8)}
        >>> def loss(w, batch, key):
        ...     return (batch["x"] @ w - batch["y"]) ** 2
        >>> local = fedpa.LocalTraining(0.1, batch_size=10)
        >>> def at(rate):
        ...     return fedpa.Server(fedpa.server.sgd(rate))
        >>> comparison = fedpa.compare(
        ...     {"slow": fedpa.fedavg(local, at(0.1)), "fast": fedpa.fedavg(local, at(1.0))},
        ...     loss, np.zeros(2), clients, rounds=3, clients_per_round=4, seeds=2, validation=0.25,
        ...     progress=False)
        >>> [row["method"] for row in comparison.table], comparison.table[1]["difference"] < 0
        (['slow', 'fast'], True)
    """
    check_counts(rounds, clients_per_round, seed)
    chosen_seeds = _list_seeds(seeds, seed)
    for own in chosen_seeds:
        check_counts(rounds, clients_per_round, own)
    check_integer("eval_every", eval_every, 1)
    check_share("min_success", min_success)
    _check_kinds(metrics, evaluate, targets, out)
    grid = _check_grid(tune or {})
    tuning_seed = chosen_seeds[0] + SEED
    if grid and tuning_seed in chosen_seeds:
        raise refuse("seeds", tuning_seed, "is the seed of tuning: leave it out")
    splits = split_clients(clients, validation, test)
    objective = loss if isinstance(loss, Objective) else Objective(loss)
    names = ["loss", *(metrics or ())]
    deciding = choose_metric(by, names, splits, evaluate is not None, bool(grid))
    best = None
    if deciding is not None:
        is_judged = splits.validation is not None and deciding.metric in names
        best = deciding._replace(metric=f"{'valid' if is_judged else 'eval'}/{deciding.metric}")
    setup = Setup(
        objective,
        params,
        splits,
        local() if engine is None else engine,
        rounds,
        clients_per_round,
        min_success,
        make_evaluation(objective, params, splits, metrics or {}, evaluate, deciding),
        eval_every,
        best,
        names,
    )
    entries = make_entries(setup, methods, grid, tuning_seed)
    if reference is not None and reference not in methods:
        raise refuse(
            "reference", reference, f"does not take part. Choose from {', '.join(methods)}"
        )
    choosing = None
    if grid and deciding is not None:
        choosing = Deciding(f"valid/{deciding.metric}", is_lower(deciding), WINDOW)
    with _open_directory(out) as place:
        plan = Plan(place, entries, chosen_seeds, choosing, MADE_BY)
        check_plan(plan)
        remember(plan)
        fits, chosen = _run(plan, deciding, progress, is_kept=out is not None)
        groups = group_runs(find_runs(plan.list_places()))
        scale = report.choose_scale(groups)
        if deciding is not None:
            scale = Scale(deciding.metric, (), WINDOW, is_lower(deciding))
        scale = scale._replace(targets=tuple(map(float, targets)))
        (results,) = report.compare_groups(groups, reference, scale)
        if out is not None:
            write_report(place, results)
    return Comparison(make_records(results), fits, chosen, None if out is None else place, results)


def _check_kinds(metrics: Any, evaluate: Any, targets: Any, out: Any) -> None:
    """Check the types of the arguments."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise refuse("metrics", metrics, 'must be functions by name: {"accuracy": f}')
    if evaluate is not None and not callable(evaluate):
        raise refuse("evaluate", evaluate, "must be a function of the parameters")
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise refuse("targets", targets, "must be a list of numbers: [0.8, 0.9]")
    for target in targets:
        check_number("targets", target, least=-math.inf)
    if out is not None and not isinstance(out, str | Path):
        raise refuse("out", out, "must be the path of a directory")


def _list_seeds(seeds: Any, first: int) -> list[int]:
    """List the given seeds, or this many from the first on."""
    if isinstance(seeds, int | np.integer):
        check_integer("seeds", seeds, 1)
        return list(range(first, first + int(seeds)))
    expected = "must be a number of runs, or different seeds: [0, 1, 2]"
    if not isinstance(seeds, Iterable):
        raise refuse("seeds", seeds, expected)
    listed = list(seeds)
    for seed in listed:
        check_integer("seeds", seed, 0)
    if not listed or len(set(listed)) < len(listed):
        raise refuse("seeds", seeds, expected)
    if first:
        raise refuse("seed", first, "applies if seeds is a number, not a list: leave it out")
    return [int(seed) for seed in listed]


@contextlib.contextmanager
def _open_directory(out: str | Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="fedpa-compare-") as name:
            yield Path(name)
        return
    place = Path(out)
    run_directory.check_comparison(place)
    with run_directory.writing(place):
        place.mkdir(parents=True, exist_ok=True)
    yield place


def _run(
    plan: Plan, deciding: Best | None, progress: bool, is_kept: bool
) -> tuple[dict[str, dict[int, Fit]], dict[str, Choice]]:
    """Carry out the plan; return the runs' results and the chosen settings, by label."""
    quiet = not progress or sys.stderr is None
    console = Console(stderr=True, quiet=quiet)
    shown = None if deciding is None or is_lower(deciding) else deciding.metric
    lines = max(LINES // len(plan.list_places()), 1)
    show = show_runs(console, shown, quiet, lines=lines)
    labels = {entry.name: entry.label for entry in plan.entries}

    def by_label(chosen: Mapping[str, Choice]) -> dict[str, Choice]:
        return {labels[name]: choice for name, choice in chosen.items()}

    try:
        runs, chosen = carry_out(
            plan,
            lambda stage: run_in_turn(stage, show),
            lambda chosen: console.print(make_choices_table(by_label(chosen))),
        )
    except KeyboardInterrupt:  # finished rounds are saved by now
        continues = f"the same call, with out={str(plan.out)!r}, continues it"
        kept = continues if is_kept else "nothing is kept without out=DIR"
        raise KeyboardInterrupt(kept) from None
    fits: dict[str, dict[int, Fit]] = {label: {} for label in labels.values()}
    for (name, seed), run in runs.items():  # finished: read, not run
        fit = run.perform(plan.place(name, seed), (), None)
        fits[labels[name]][seed] = fit if is_kept else fit._replace(out=None)
    return fits, by_label(chosen)


def make_entries(
    setup: Setup,
    methods: Any,
    grid: Mapping[str, Sequence[Any]],
    tuning_seed: int,
) -> list[Entry]:
    """Make the entries; refuses values that are not methods, and settings that no method takes."""
    if not isinstance(methods, Mapping) or not methods:
        raise refuse("methods", methods, 'must be methods by label: {"FedAvg": fedpa.fedavg(…)}')
    entries: list[Entry] = []
    for label, item in methods.items():
        if not isinstance(label, str) or not label.strip():
            raise refuse("methods", label, "a label must be a string")
        entries.append(_make_entry(setup, label, item, grid, tuning_seed, entries))
    for name in grid:
        if not any(name in entry.grid for entry in entries):
            raise refuse("tune", name, "no method takes it")
    return entries


def _make_entry(
    setup: Setup,
    label: str,
    item: Any,
    grid: Mapping[str, Sequence[Any]],
    tuning_seed: int,
    others: Sequence[Entry],
) -> Entry:
    taken = _find_taken(label, item, grid)
    built: dict[str, Assembly] = {}

    def assemble(settings: Settings) -> Assembly:
        key = json.dumps(settings)
        if key not in built:
            try:
                method = item if taken is None else item(**settings)
            except FedpaError as error:
                raise FedpaError(f"methods[{label!r}]: {error}") from None
            if not callable(method):
                what = "must be" if taken is None else "was returned: must be"
                raise refuse(f"methods[{label!r}]", method, f"{what} a method, as fedpa.fedavg(…)")
            built[key] = Assembly(setup, method)
        return built[key]

    def make(settings: Settings, seed: int | None) -> OwnRun:
        number = tuning_seed if seed is None else seed
        return OwnRun(assemble(settings), setup.rounds, number, label, settings)

    own = {name: grid[name] for name in taken or ()}
    assemblies = [assemble(settings) for settings in list_points(own)]
    try:
        _ = assemblies[0].prepared  # refuses a method that does not fit the problem
    except FedpaError as error:
        raise FedpaError(f"methods[{label!r}]: {error}") from None
    stem = re.sub(r"[^\w+.=]+", "-", label).strip("-.") or "method"
    names = [stem, *(f"{stem}-{k}" for k in range(2, len(others) + 3))]
    used = {entry.name for entry in others}
    return Entry(next(name for name in names if name not in used), label, make, own)


def _find_taken(label: str, item: Any, grid: Mapping[str, Sequence[Any]]) -> list[str] | None:
    """Find the settings that a function of settings takes; None if it is a method itself.

    A user's method has one required parameter, which is named `objective` or positional-only. The
    parameters of any other function are settings.
    """
    if isinstance(item, Described) or not callable(item):
        return None
    try:
        parameters = inspect.signature(item).parameters.values()
    except ValueError:  # functions not written in Python have no signature
        return None
    named = [own for own in parameters if own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY)]
    takes_all = any(own.kind is own.VAR_KEYWORD for own in parameters)
    if parameters and not named and not takes_all:
        return None
    taken = list(grid) if takes_all else [own.name for own in named if own.name in grid]
    missing = [own.name for own in named if own.name not in grid and own.default is own.empty]
    if missing == [OBJECTIVE] and (takes_all or not taken):
        return None
    if missing:
        raise refuse(
            f"methods[{label!r}]'s parameter",
            missing[0],
            f"is not in tune ({', '.join(grid) or 'which is empty'}). A function of settings takes "
            f"names of tune; your own method takes one argument, `{OBJECTIVE}`",
        )
    return taken


def _check_grid(tune: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Check that each setting has at least two different values that can be stored."""
    if not isinstance(tune, Mapping):
        raise refuse(
            "tune", tune, 'must be values by setting: {"server_learning_rate": [0.3, 1, 3]}'
        )
    grid: dict[str, list[Any]] = {}
    for name, values in tune.items():
        if not isinstance(name, str) or isinstance(values, str) or not hasattr(values, "__iter__"):
            raise refuse(f"tune[{name!r}]", values, "must be a list of values, as [0.3, 1, 3]")
        grid[name] = [value.item() if isinstance(value, np.generic) else value for value in values]
        for value in grid[name]:
            is_plain = isinstance(value, bool | int | float | str)
            if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
                raise refuse(f"tune[{name!r}]", value, "must be finite numbers or strings")
        if len(set(grid[name])) < max(len(grid[name]), 2):
            raise refuse(f"tune[{name!r}]", grid[name], "must be at least two different values")
    return grid
