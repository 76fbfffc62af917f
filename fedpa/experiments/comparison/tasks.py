"""The methods of `fedpa compare`: runs of a task by their configurations.

Tuning tries the same multiples of each method's server rate, or of its client rate if the method
fixes the server's.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final

from fedpa.algorithms.plateau import Plateau
from fedpa.errors import FedpaError, refuse, suggest
from fedpa.experiments.comparison.comparison import (
    SEED,
    Deciding,
    Entry,
    Planned,
    Run,
    Settings,
    perform,
)
from fedpa.experiments.config import RunConfig, is_all_burn_in, resolve
from fedpa.experiments.hyperparameters import count_plateau_values, replace_fields
from fedpa.experiments.methods import METHODS, build_rule, drop_others, reads_setting
from fedpa.experiments.run import check_resumable, run
from fedpa.experiments.sweeps.space import check_space, configure
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import workers
from fedpa.metrics.metric import lower_is_better
from fedpa.server import schedules
from fedpa.training.callbacks import Callback, stop_at_plateau
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem

BEGINS_AS = "fedavg"
RATES = ("server_learning_rate", "client_learning_rate")


@final
@dataclasses.dataclass(frozen=True)
class TaskRun(Run):
    """A run of a task."""

    config: RunConfig
    """Resolved."""
    problem: Problem | None
    """None while it is sent to another process, which loads its own."""
    until: Plateau | None = None
    """It ends when this plateau is reached."""

    @property
    def rounds(self) -> int:
        return self.config.rounds

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def key(self) -> str:
        return repr(self.config) + ("" if self.until is None else repr(self.until))

    @property
    def end(self) -> int | Plateau:
        return self.rounds if self.until is None else self.until

    def find_burn_in(self) -> "TaskRun | None":
        end = find_burn_in_end(self.config)
        return None if end is None else self._until(end)

    def shorten(self, end: int | Plateau) -> "TaskRun | None":
        is_earlier = not isinstance(end, int) or end < self.rounds
        return self._until(end) if self.config.method == BEGINS_AS and is_earlier else None

    def _until(self, end: int | Plateau) -> "TaskRun":
        """FedAvg with these settings until the end."""
        if isinstance(end, int):
            return TaskRun(as_burn_in(self.config, end), self.problem)
        return TaskRun(as_burn_in(self.config, self.rounds), self.problem, end)

    def check(self, out: Path) -> None:
        assert self.problem is not None
        check_resumable(self.config, out, self.problem)

    def perform(self, out: Path, callbacks: Sequence[Callback], branch: Path | None) -> Fit:
        return run(
            self.config,
            out,
            resuming=True,
            callbacks=[*callbacks, *([] if self.until is None else [stop_at_plateau(self.until)])],
            problem=self.problem,
            branch=branch,
        )


def find_burn_in_end(config: RunConfig) -> int | Plateau | None:
    """When its burn-in by FedAvg ends; None if it has no burn-in, or nothing after it."""
    h = config.hyperparameters
    if not METHODS[config.method].begins_as_fedavg:
        return None
    if h.burn_in_rounds == "auto":
        return build_rule(h)
    return h.burn_in_rounds if 0 < h.burn_in_rounds < config.rounds else None


def as_burn_in(config: RunConfig, rounds: int) -> RunConfig:
    """Configure `rounds` rounds of FedAvg with these settings, without what happens later."""
    h = drop_others(BEGINS_AS, config.hyperparameters, among=[config.method])
    h = dataclasses.replace(
        h,
        at_switch_rate=None,
        client_schedule=schedules.cut(h.client_schedule, rounds),
        server_schedule=schedules.cut(h.server_schedule, rounds),
    )
    return resolve(dataclasses.replace(config, method=BEGINS_AS, rounds=rounds, hyperparameters=h))


# Choosing rates


class Tuning(NamedTuple):
    """How each method's rate is chosen."""

    multiples: Sequence[float]
    """Multiples of its rate."""
    rounds: int | None = None
    """Rounds of tuning runs; default: as many as are compared."""
    by: str | None = None
    """The metric of the choice; default: the task's."""


class Search(NamedTuple):
    """The grid for a method's rate."""

    base: RunConfig
    """Settings of all runs; not resolved, since a field may depend on the rate."""
    grid: Mapping[str, Sequence[float]]


def read_multiples(text: str) -> tuple[float, ...]:
    """Parse `0.3,1,3` as numbers."""
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise refuse("tune", text, "must be numbers separated by commas, as 0.3,1,3") from None
    if len(found) < 2 or len(set(found)) < len(found) or not all(0 < x < 1e9 for x in found):
        raise refuse("tune", text, "must be at least two different multiples > 0, as 0.3,1,3")
    return tuple(sorted(found))


def choose_deciding(task: str, preset: str | None, tuning: Tuning) -> Deciding:
    """Choose the metric of tuning, on the task's validation clients."""
    own = task_named(task).metric
    if tuning.by not in (None, own, "loss"):
        raise refuse("tune_by", tuning.by, suggest(tuning.by, sorted({own, "loss"})))
    metric = f"valid/{tuning.by or own}"
    return Deciding(metric, lower_is_better(metric), preset_named(task, preset)[1].last)


def check_validation(task: str, problem: Problem) -> None:
    """Refuse to tune on the test split."""
    if problem.validation is None:
        takes = "validation_share" in task_named(task).takes
        hint = "give --validation-share 0.1" if takes else f"task {task} has none"
        raise FedpaError(f"tune: there are no validation clients: {hint}")


def plan_search(config: RunConfig, tuning: Tuning) -> Search:
    """Plan the grid for a method's rate; refuses values that can't be run.

    Args:
        config: The method's run, not resolved.
        tuning: Settings of tuning, the same for all methods.
    """
    own, rounds = resolve(config).hyperparameters, tuning.rounds
    free = [name for name in RATES if reads_setting(config.method, own, name, [1.2345])]
    if not free:
        raise refuse("tune", config.method, f"method {config.method} has no rate to tune")
    # Rounded to three digits, to avoid 0.30000000000000004.
    grid = {free[0]: tuple(float(f"{getattr(own, free[0]) * x:.3g}") for x in tuning.multiples)}
    # Tuning does not evaluate the test split, which would take time.
    base = replace_fields(
        config, seed=config.seed + SEED, eval_split="validation", test_at_end=False
    )
    if rounds is not None:
        base = replace_fields(base, rounds=rounds)
    if rounds is not None and own.burn_in_rounds != "auto":
        # The same share of rounds is burn-in, so that the rate also suits sampling.
        share = round(own.burn_in_rounds * rounds / config.rounds)
        base = replace_fields(base, burn_in_rounds=share)
    samples = rounds is None or not is_all_burn_in(base)
    if own.burn_in_rounds == "auto" and rounds is not None:
        values, least = count_plateau_values(own, rounds, base.eval_every)
        samples = values >= least
    if not samples and not is_all_burn_in(resolve(config)):
        raise refuse(
            "tune_rounds", rounds, f"none of them would sample for {config.method}: give more"
        )
    check_space(grid, base)
    return Search(base, grid)


def make_entry(
    config: RunConfig, label: str, problem: Problem, search: Search | None = None
) -> Entry:
    """Make the entry of a method.

    Args:
        config: Its run, not resolved, with any seed.
        label: Its name in tables.
        problem: The task.
        search: The grid for its rate.
    """

    def make(settings: Settings, seed: int | None) -> TaskRun:
        if seed is None:
            assert search is not None
            return TaskRun(configure(search.base, settings), problem)
        own = resolve(dataclasses.replace(config, seed=seed))
        return TaskRun(resolve(replace_fields(own, **settings)) if settings else own, problem)

    return Entry(config.method, label, make, {} if search is None else search.grid)


# Several at a time


def run_side_by_side(stage: Sequence[Planned], jobs: int, tell: Callable[[Planned], None]) -> None:
    """Carry out `jobs` runs at a time, in processes that load the task themselves.

    tell: called with each run that ends.
    """
    with workers(jobs) as submit:
        pending = {}
        for own in stage:
            assert isinstance(own.run, TaskRun)
            sent = own._replace(run=dataclasses.replace(own.run, problem=None))
            pending[submit(_perform, sent, own.run.config)] = own
        for future in concurrent.futures.as_completed(pending):
            planned = pending[future]
            try:
                finished = future.result()
            except FedpaError as error:
                raise FedpaError(f"{planned.label}: {error}") from None
            if not finished:
                raise KeyboardInterrupt
            tell(planned)


def _perform(planned: Planned, problem: Problem, *callbacks: Callback) -> bool:
    """In another process."""
    assert isinstance(planned.run, TaskRun)
    return perform(
        planned._replace(run=dataclasses.replace(planned.run, problem=problem)), callbacks
    )
