"""A comparison: several methods on one task, each at its own rate if asked for.

Rates are chosen on validation from multiples of each method's own. The same multiples for each, of
the server's rate, or of the client's where the method fixes the server's. Where the best is at an
end of what was tried, the next one beyond it is tried, too, up to `MOST_BEYOND` times: no method
should lose by where its grid ended. Where none gives a number, lower ones are tried. Rates are
chosen with a seed that the comparison does not have.

FedPA and its controls begin as FedAvg: with one seed and the same settings their first rounds are
the same numbers, bit for bit. One run makes them, the others start from its last checkpoint.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from fedpa.errors import FedpaError, refuse
from fedpa.experiments.config import RunConfig, is_all_burn_in, resolve
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.methods import METHODS, drop_others, reads_setting
from fedpa.experiments.run import check_resumable, run
from fedpa.experiments.sweeps.search import Trial, choose_search, find_best
from fedpa.experiments.sweeps.space import Space
from fedpa.experiments.sweeps.sweep import (
    Sweep,
    Watch,
    check_place,
    check_sweep,
    find_metric,
    sweep,
)
from fedpa.experiments.tasks.task import task_named
from fedpa.experiments.workers import workers
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.problem import Problem

K = TypeVar("K", bound=Hashable)
BEGINS_AS = "fedavg"
TUNING = "tuning"
"""Where the sweeps are, one for each method."""
RATES = ("server_learning_rate", "client_learning_rate")
SEED = 1_000_000
"""Added to the comparison's first seed."""
MOST_BEYOND = 3


class Comparison(NamedTuple):
    """What is compared, and where it is recorded."""

    out: Path
    configs: Mapping[tuple[str, int], RunConfig]
    """(method, seed) → its run's settings, resolved. All have the same task options."""
    labels: Mapping[str, str]
    """Method → what tables call it."""
    problem: Problem
    jobs: int
    """Runs at a time."""

    def place(self, method: str, seed: int) -> Path:
        return self.out / f"{method}-{seed}"


class PlannedRun(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    branch: Path | None = None
    """The run that makes its first rounds, where others begin with the same."""


# First rounds that several runs have in common


def find_burn_in(config: RunConfig) -> RunConfig | None:
    """The run that is this one's burn-in; None if it has none, or nothing after it."""
    rounds = config.hyperparameters.burn_in_rounds
    method = METHODS[config.method]
    if not (method.samples and method.begins_as_fedavg and 0 < rounds < config.rounds):
        return None
    return as_burn_in(config, rounds)


def as_burn_in(config: RunConfig, rounds: int) -> RunConfig:
    """`rounds` rounds of FedAvg with these settings."""
    h = drop_others(BEGINS_AS, config.hyperparameters, among=[config.method])
    return resolve(dataclasses.replace(config, method=BEGINS_AS, rounds=rounds, hyperparameters=h))


def find_shared_burn_in(configs: Mapping[K, RunConfig]) -> dict[K, RunConfig]:
    """For each run that shares its first rounds with others, the run that makes them for all."""
    wanted = {key: find_burn_in(config) for key, config in configs.items()}
    lengths = {first.rounds for first in wanted.values() if first is not None}
    for key, config in configs.items():
        if config.method == BEGINS_AS and len(lengths) == 1 and max(lengths) < config.rounds:
            wanted[key] = as_burn_in(config, max(lengths))
    firsts = [first for first in wanted.values() if first is not None]
    return {
        key: first for key, first in wanted.items() if first is not None and firsts.count(first) > 1
    }


# Choosing rates


class Tuned(NamedTuple):
    """What was tried to choose a method's rate."""

    rate: str
    """Which of `RATES`."""
    trials: Sequence[Trial]
    """By rate."""
    metric: str
    """By which they were chosen: valid/accuracy."""


def read_multiples(text: str) -> tuple[float, ...]:
    """`0.3,1,3` as numbers."""
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise refuse("tune", text, "must be numbers with commas, as 0.3,1,3") from None
    if len(found) < 2 or len(set(found)) < len(found) or not all(0 < x < 1e9 for x in found):
        raise refuse("tune", text, "must be at least two different multiples > 0, as 0.3,1,3")
    return tuple(sorted(found))


def plan_searches(
    configs: Sequence[RunConfig], multiples: Sequence[float], rounds: int | None, by: str | None
) -> dict[str, Sweep]:
    """For each method the sweep that chooses its rate; refuses what can't be run.

    Args:
        configs: Each method's run, not resolved.
        multiples: What its rate is multiplied with.
        rounds: Of the runs that choose; default: as many as are compared.
        by: The metric that decides; default: the task's.
    """
    known = {task_named(config.task).metric for config in configs} | {"loss"}
    if by is not None and by not in known:
        raise refuse("tune_by", by, f"choose from {', '.join(sorted(known))}")
    by = "loss" if by == "loss" else None  # the task's own is what decides anyway
    return {config.method: _plan_search(config, multiples, rounds, by) for config in configs}


def _plan_search(
    config: RunConfig, multiples: Sequence[float], rounds: int | None, by: str | None
) -> Sweep:
    own = resolve(config).hyperparameters
    free = [name for name in RATES if reads_setting(config.method, own, name, [1.2345])]
    if not free:
        raise refuse("tune", config.method, f"method {config.method} has no rate to choose")
    rate = free[0]
    # Three digits are enough for a rate, and 0.30000000000000004 is none.
    values = tuple(float(f"{getattr(own, rate) * multiple:.3g}") for multiple in multiples)
    # What is chosen on validation does not see the test split, which takes a while to see.
    base = replace_fields(
        config, seed=config.seed + SEED, eval_split="validation", test_at_end=False
    )
    if rounds is not None:  # the same share of them is burn-in: a rate is chosen for sampling, too
        share = round(own.burn_in_rounds * rounds / config.rounds)
        base = replace_fields(base, rounds=rounds, burn_in_rounds=share)
    space = {rate: values}
    if is_all_burn_in(resolve(base)) and not is_all_burn_in(resolve(config)):
        raise refuse(
            "tune_rounds", rounds, f"none of them would sample for {config.method}: give more"
        )
    return _search_space(base, space, by)


def check_validation(task: str, problem: Problem) -> None:
    """Refuse to choose on the test split."""
    if problem.validation is None:
        takes = "validation_share" in task_named(task).takes
        hint = "give --validation-share 0.1" if takes else f"task {task} has none"
        raise FedpaError(f"tune: there are no validation clients to choose on: {hint}")


def check_searches(comparison: Comparison, searches: Mapping[str, Sweep]) -> None:
    """Refuse sweeps of other settings in the directory, before anything is written."""
    for name, settings in searches.items():
        check_place(comparison.out / TUNING / name, settings)


def tune_rates(
    comparison: Comparison,
    searches: Mapping[str, Sweep],
    begin: Callable[[str, Trial, bool], Sequence[Callback]],
) -> tuple[Comparison, dict[str, Tuned]]:
    """Run each method's trials; those that are done are not done again.

    begin: (method, trial, whether it was begun before) → callbacks for its rounds.

    Returns:
        The comparison at the rates that are best, and what was tried.
    """
    found: dict[str, Tuned] = {}
    for name, settings in searches.items():
        (rate,) = settings.space
        watch, trials = Watch(functools.partial(begin, name)), list[Trial]()
        for part in range(1 + MOST_BEYOND):
            place = comparison.out / TUNING / (f"{name}+{part}" if part else name)
            trials += sweep(settings, place, comparison.problem, jobs=comparison.jobs, watch=watch)
            trials.sort(key=lambda trial, rate=rate: trial.params[rate])  # type: ignore[misc]
            further = find_next_rate(trials, rate)
            if further is None:
                break
            settings = _search_space(settings.base, {rate: (further,)}, settings.by)
        if find_best(trials) is None:
            raise FedpaError(f"tune: no rate that was tried for {name} gave a number")
        metric = find_metric(settings.base.task, comparison.problem, settings.by)
        found[name] = Tuned(rate, trials, metric)
    configs = {
        (name, seed): _use_best(config, found[name].trials)
        for (name, seed), config in comparison.configs.items()
    }
    return comparison._replace(configs=configs), found


def _search_space(base: RunConfig, space: Space, by: str | None) -> Sweep:
    return check_sweep(Sweep(base, space, choose_search("grid", space, None, 0), by))


def _use_best(config: RunConfig, trials: Sequence[Trial]) -> RunConfig:
    """The method's run at the rate that was best."""
    top = find_best(trials)
    assert top is not None
    return resolve(replace_fields(config, **top.params))


def find_next_rate(trials: Sequence[Trial], rate: str) -> float | None:
    """The next rate after the best, if that is at an end: as far from it as it is from the last.

    Where none is best, since all diverged, the next below the lowest.
    """
    top = find_best(trials) or trials[0]
    for end, inner in ((trials[0], trials[1]), (trials[-1], trials[-2])):
        if top.params == end.params:  # trials of several sweeps may have the same number
            return float(f"{end.params[rate] ** 2 / inner.params[rate]:.3g}")
    return None


# Carrying out


def plan_runs(comparison: Comparison) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """The runs that make the first rounds of several others that have not begun; and the others."""
    shared = find_shared_burn_in(comparison.configs)
    first: dict[RunConfig, PlannedRun] = {}
    for key, config in shared.items():
        if config not in first and not list_checkpoints(comparison.place(*key)):
            # By its settings: other methods, or another burn-in, leave it as it is.
            digest = hashlib.sha256(repr(config).encode()).hexdigest()[:8]
            place = comparison.out / run_directory.BURN_IN / f"{config.seed}-{digest}"
            label = f"first {config.rounds} rounds, seed {config.seed}"
            first[config] = PlannedRun(label, config, place)
    one_seed = len({seed for _, seed in comparison.configs}) == 1
    runs = []
    for (name, seed), config in comparison.configs.items():
        label = comparison.labels[name] + ("" if one_seed else f", seed {seed}")
        begin = first.get(shared[name, seed]) if (name, seed) in shared else None
        branch = None if begin is None else begin.out
        runs.append(PlannedRun(label, config, comparison.place(name, seed), branch))
    return list(first.values()), runs


def check_runs(comparison: Comparison) -> None:
    """Refuse runs of other settings in the directory, before anything is written."""
    for planned in itertools.chain(*plan_runs(comparison)):
        check_resumable(planned.config, planned.out, comparison.problem)


def carry_out(
    comparison: Comparison,
    show: Callable[[PlannedRun, int], contextlib.AbstractContextManager[Sequence[Callback]]],
    tell: Callable[[PlannedRun], None],
) -> None:
    """Run what is not finished yet.

    Args:
        comparison: What is compared.
        show: A run in this process and the longest label → a context with callbacks for its rounds.
        tell: Called with each run that ended in a process of its own.
    """
    for stage in plan_runs(comparison):
        if comparison.jobs > 1 and len(stage) > 1:
            _run_side_by_side(stage, comparison.jobs, tell)
            continue
        width = max((len(planned.label) for planned in stage), default=0)
        for planned in stage:
            with show(planned, width) as callbacks:
                _perform(planned, comparison.problem, *callbacks)


def _run_side_by_side(
    stage: Sequence[PlannedRun], jobs: int, tell: Callable[[PlannedRun], None]
) -> None:
    """`jobs` at a time, in processes that load the task for themselves."""
    with workers(jobs) as submit:
        pending = {submit(_perform, planned, planned.config): planned for planned in stage}
        for future in concurrent.futures.as_completed(pending):
            planned = pending[future]
            try:
                finished = future.result()
            except FedpaError as error:
                raise FedpaError(f"{planned.label}: {error}") from None
            if not finished:
                raise KeyboardInterrupt
            tell(planned)


def _perform(planned: PlannedRun, problem: Problem, *callbacks: Callback) -> bool:
    """Whether it came to its end."""
    run_directory.wait_for_lock(planned.out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all .* rounds are burn-in")  # said for all runs at once
        fit = run(
            planned.config,
            planned.out,
            resuming=True,
            callbacks=callbacks,
            problem=problem,
            branch=planned.branch,
        )
    return fit.finished
