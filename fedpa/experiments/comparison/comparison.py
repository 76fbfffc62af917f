"""A comparison: several methods on the same cohorts, each with its own settings if tuned.

`fedpa compare` uses it for tasks, `fedpa.compare` for the user's model. This module depends on
neither: a `Run` can be carried out in a directory, an `Entry` makes the runs of one method.

Settings are chosen from a grid on validation clients, with a seed that is not compared. If a single
setting is tuned and its best value is at an end of the grid, the grid is extended beyond it, up to
`MOST_BEYOND` times, so that no method loses because its grid was too short. If no value gives a
number, lower ones are tried.

FedPA and its controls start as FedAvg: with one seed and the same settings their first rounds are
equal, bit for bit. One run computes them, and the others start from its last checkpoint. If the
plateau ends them, that run ends at the plateau.
"""

import abc
import contextlib
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedpa.algorithms.plateau import Plateau
from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, TooFewClientsError
from fedpa.experiments.config import table_of
from fedpa.experiments.report.curves import compute_finals, read_curve
from fedpa.experiments.sweeps.space import describe_point
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoint import list_checkpoints, prune_checkpoints
from fedpa.training.loop import Fit
from fedpa.training.provenance import differences
from fedpa.training.run_directory import BURN_IN, TUNING

SEED = 1_000_000
"""Added to the comparison's first seed to give the seed of tuning."""
MOST_BEYOND = 3
Settings = Mapping[str, Any]


class Run(abc.ABC):
    """One run of a method: all settings that determine its numbers, and how it is carried out."""

    @property
    @abc.abstractmethod
    def rounds(self) -> int: ...

    @property
    @abc.abstractmethod
    def seed(self) -> int: ...

    @property
    @abc.abstractmethod
    def key(self) -> str:
        """The settings that determine its numbers, as text."""

    @property
    def end(self) -> int | Plateau:
        """After how many rounds it ends, or at which plateau."""
        return self.rounds

    def is_same(self, other: "Run") -> bool:
        """Whether both certainly have the same numbers."""
        return self.key == other.key

    @abc.abstractmethod
    def find_burn_in(self) -> "Run | None":
        """The run of FedAvg that is this one's burn-in; None if it has none."""

    @abc.abstractmethod
    def shorten(self, end: int | Plateau) -> "Run | None":
        """Its first rounds until an earlier end, if it is FedAvg; else None."""

    @abc.abstractmethod
    def check(self, out: Path) -> None:
        """Refuse other settings than those of the run in `out`, if it contains one."""

    @abc.abstractmethod
    def perform(self, out: Path, callbacks: Sequence[Callback], branch: Path | None) -> Fit:
        """Start the run in `out`, or resume it there; a finished one is returned.

        branch: a run whose rounds are this one's first: it starts from its end.
        """


class Entry(NamedTuple):
    """A method of the comparison."""

    name: str
    """Prefix of its directories: fedpa-0."""
    label: str
    """Its name in tables."""
    make: Callable[[Settings, int | None], Run]
    """(chosen settings, seed) → its run; without a seed, a tuning run."""
    grid: Mapping[str, Sequence[Any]] = {}
    """Setting to tune → values to try."""


class Deciding(NamedTuple):
    """The metric by which settings are chosen."""

    metric: str
    """Its name in records: valid/accuracy."""
    lower: bool
    """Whether lower is better."""
    last: int
    """Rounds whose evaluations are averaged."""


class Plan(NamedTuple):
    """What is compared, and where it is recorded."""

    out: Path
    entries: Sequence[Entry]
    seeds: Sequence[int]
    deciding: Deciding | None
    """None: nothing is tuned."""
    made_by: str
    """`fedpa compare` or `fedpa.compare`."""

    def place(self, name: str, seed: int) -> Path:
        """Return the directory of an entry's run."""
        return self.out / f"{name}-{seed}"

    def list_places(self) -> list[Path]:
        """List the runs' directories, in the order of the table."""
        return [self.place(entry.name, seed) for entry in self.entries for seed in self.seeds]


class Planned(NamedTuple):
    """A run and its directory."""

    label: str
    run: Run
    out: Path
    branch: Path | None = None
    """The run of its first rounds, if other runs share them."""
    is_trial: bool = False
    """Whether it is a tuning run, which may fail."""


Carry = Callable[[Sequence[Planned]], None]
"""Carry out runs that do not depend on each other."""
Show = Callable[[Planned, int], contextlib.AbstractContextManager[Sequence[Callback]]]
"""(a run, the longest label) → a context with callbacks for its rounds."""


# Choosing settings


class Trial(NamedTuple):
    """One setting of the grid and its value."""

    number: int
    """From 0."""
    settings: Settings
    value: float | None
    """The mean of the last evaluations; None if it is not a number or the run failed."""


class Choice(NamedTuple):
    """The trials of an entry's tuning."""

    trials: Sequence[Trial]
    """Sorted by value if one setting is tuned; otherwise in the order of the grid."""
    best: Trial
    metric: str
    """The metric of the choice: valid/accuracy."""


def choose_settings(plan: Plan, carry: Carry) -> dict[str, Choice]:
    """Run the trials of all entries; finished trials are kept.

    Returns:
        Entry's name → its trials, for entries with settings to tune.
    """
    tried: dict[str, list[Trial]] = {}
    if plan.deciding is None:
        return {}
    waiting = [(entry, list_points(entry.grid)) for entry in plan.entries if entry.grid]
    for _ in range(1 + MOST_BEYOND):
        staged = [
            (entry, trial)
            for entry, points in waiting
            for trial in _number_trials(points, len(tried.get(entry.name, ())))
        ]
        planned = [_plan_trial(plan, entry, trial) for entry, trial in staged]
        _carry_out(planned, plan.out / TUNING / BURN_IN, carry)
        for (entry, trial), run in zip(staged, planned, strict=True):
            measured = trial._replace(value=_measure_trial(run.out, plan.deciding))
            tried.setdefault(entry.name, []).append(measured)
        waiting = [
            (entry, [further])
            for entry, _ in waiting
            if (further := find_next(tried[entry.name], plan.deciding.lower)) is not None
            and _can_run(entry, further)
        ]
    return {name: _make_choice(name, trials, plan.deciding) for name, trials in tried.items()}


def list_points(grid: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """List all combinations of the values."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def find_best(trials: Sequence[Trial], lower: bool) -> Trial | None:
    """Find the trial with the best value; of equal ones the first."""
    sign = -1 if lower else 1
    valued = [(sign * t.value, -t.number, t) for t in trials if t.value is not None]
    return max(valued, key=lambda entry: entry[:2])[2] if valued else None


def find_next(trials: Sequence[Trial], lower: bool) -> Settings | None:
    """Extend the grid by the next value beyond the best, by the same factor, if it is at an end.

    If all diverged, the next value below the lowest. None if the best is between others, if more
    than one setting is tuned, or if values are not positive. Whole numbers stay whole.
    """
    (name, *others) = trials[0].settings
    values = [trial.settings[name] for trial in trials]
    if others or not all(_is_positive(value) for value in values):
        return None
    ordered = sort_trials(trials)
    top = find_best(ordered, lower) or ordered[0]
    for end, inner in ((ordered[0], ordered[1]), (ordered[-1], ordered[-2])):
        if top is end:
            further = float(f"{end.settings[name] ** 2 / inner.settings[name]:.3g}")
            if all(isinstance(value, int) for value in values):
                further = round(further)
            return {name: further} if further > 0 and further not in values else None
    return None


def sort_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by value if one numeric setting is tuned; otherwise keep their order."""
    if any(len(t.settings) > 1 or not _is_number(*t.settings.values()) for t in trials):
        return list(trials)
    return sorted(trials, key=lambda trial: next(iter(trial.settings.values())))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _number_trials(points: Sequence[Settings], first: int) -> list[Trial]:
    return [Trial(number, settings, None) for number, settings in enumerate(points, start=first)]


def _plan_trial(plan: Plan, entry: Entry, trial: Trial) -> Planned:
    label = f"choosing {entry.label}'s settings: {describe_point(trial.settings)}"
    place = plan.out / TUNING / f"{entry.name}-{trial.number}"
    return Planned(label, entry.make(trial.settings, None), place, is_trial=True)


def _can_run(entry: Entry, settings: Settings) -> bool:
    """Check whether the method accepts a value beyond its grid."""
    try:
        entry.make(settings, None)
    except FedpaError:
        return False
    return True


def _measure_trial(out: Path, deciding: Deciding) -> float | None:
    summary = run_directory.read_summary(out)
    if summary is None:  # its clients failed
        return None
    # There are many trials: keep only the last checkpoint and the best round.
    best = summary.get("best")
    prune_checkpoints(out, 1, [] if best is None else [best["round"]])
    curve = read_curve(run_directory.read_metrics(out), deciding.metric)
    (value,) = compute_finals([curve], deciding.last)
    return value if math.isfinite(value) else None


def _make_choice(name: str, trials: Sequence[Trial], deciding: Deciding) -> Choice:
    best = find_best(trials, deciding.lower)
    if best is None:
        raise FedpaError(f"tune: no value tried for {name} gave a number. Give other values")
    return Choice(sort_trials(trials), best, deciding.metric)


# Carrying out


def check_plan(plan: Plan) -> None:
    """Refuse a directory that contains a comparison with other settings."""
    path = plan.out / run_directory.COMPARISON
    if path.is_file():
        then, now = table_of("out", path), _make_record(plan)
        common = set(then.get("tuning", {})) & set(now.get("tuning", {}))
        changed = differences(_keep_tuning(then, common), _keep_tuning(now, common), ["words"])
        is_ours = then.get("made_by") == plan.made_by
        if is_ours and ("by" in then) != ("by" in now):  # `by` is present only with tuning
            given = ("was given and is not", "was not given and is")
            changed = [f"tune {given['by' in now]}"]
        if changed:
            raise FedpaError(
                f"out = {str(plan.out)!r}: contains a comparison with other settings: "
                f"{'; '.join(changed)}. Give another directory"
            )
    trials = [
        _plan_trial(plan, entry, trial)
        for entry in plan.entries
        for trial in _number_trials(list_points(entry.grid) if entry.grid else [], 0)
    ]
    _check(trials, plan.out / TUNING / BURN_IN)
    if plan.deciding is None:
        _check(_plan_runs(plan, {}), plan.out / BURN_IN)


def remember(plan: Plan, words: Sequence[str] = ()) -> None:
    """Write the comparison's settings; words: the command's arguments, with which it continues."""
    content = {"words": words} if words else {}
    text = tomli_w.dumps(content | _make_record(plan))
    with run_directory.writing(plan.out):
        write_atomically(plan.out / run_directory.COMPARISON, text.encode())


def _make_record(plan: Plan) -> dict[str, Any]:
    if plan.deciding is None:
        return {"made_by": plan.made_by}
    grids = {
        entry.name: {name: list(values) for name, values in entry.grid.items()}
        for entry in plan.entries
        if entry.grid
    }
    return {"made_by": plan.made_by, "by": plan.deciding.metric, "tuning": grids}


def _keep_tuning(table: Mapping[str, Any], entries: set[str]) -> dict[str, Any]:
    """Keep the tuning of entries that both comparisons have, since methods may be added."""
    kept = {name: grid for name, grid in table.get("tuning", {}).items() if name in entries}
    return {**table, "tuning": kept}


def carry_out(
    plan: Plan,
    carry: Carry,
    tell: Callable[[Mapping[str, Choice]], None] = lambda chosen: None,
) -> tuple[dict[tuple[str, int], Run], dict[str, Choice]]:
    """Tune settings if asked to, and carry out the runs that are not finished.

    Args:
        plan: What is compared.
        carry: How runs are carried out.
        tell: Called with the chosen settings.
    Returns:
        The runs by entry's name and seed, and the chosen settings.
    """
    chosen = choose_settings(plan, carry)
    if chosen:
        tell(chosen)
    planned = _plan_runs(plan, chosen)
    _carry_out(planned, plan.out / BURN_IN, carry)
    keys = [(entry.name, seed) for entry in plan.entries for seed in plan.seeds]
    return {key: own.run for key, own in zip(keys, planned, strict=True)}, chosen


def _plan_runs(plan: Plan, chosen: Mapping[str, Choice]) -> list[Planned]:
    return [
        Planned(
            entry.label + ("" if len(plan.seeds) == 1 else f", seed {seed}"),
            entry.make(chosen[entry.name].best.settings if entry.name in chosen else {}, seed),
            plan.place(entry.name, seed),
        )
        for entry in plan.entries
        for seed in plan.seeds
    ]


def _check(planned: Sequence[Planned], place: Path) -> None:
    """Refuse directories that contain runs with other settings."""
    for own in itertools.chain(*share_burn_in(planned, place)):
        own.run.check(own.out)


def _carry_out(planned: Sequence[Planned], place: Path, carry: Carry) -> None:
    _check(planned, place)
    for stage in share_burn_in(planned, place):
        carry([own for own in stage if not _is_finished(own)])


def _is_finished(planned: Planned) -> bool:
    out = planned.out
    return run_directory.is_run(out) and run_directory.read_run(out).is_finished(planned.run.rounds)


def share_burn_in(planned: Sequence[Planned], place: Path) -> tuple[list[Planned], list[Planned]]:
    """Plan the runs, in `place`, of first rounds that several runs share; and these runs.

    Only shared runs that some run still needs are planned.
    """
    wanted = [own.run.find_burn_in() for own in planned]
    ends = {first.end for first in wanted if first is not None}
    if len(ends) == 1:
        (end,) = ends
        wanted = [
            own.run.shorten(end) if first is None else first
            for own, first in zip(planned, wanted, strict=True)
        ]
    same: dict[str, Run] = {}
    members: dict[str, list[int]] = {}
    for k, first in enumerate(wanted):
        if first is not None and first.is_same(same.setdefault(first.key, first)):
            members.setdefault(first.key, []).append(k)
    making: list[Planned] = []
    others = list(planned)
    for key, own in members.items():
        if len(own) > 1 and not all(list_checkpoints(planned[k].out) for k in own):
            first, is_trial = same[key], planned[own[0]].is_trial
            # Named by its settings, so that other methods or another burn-in do not change it.
            out = place / f"{first.seed}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            label = describe_first_rounds(first.end)
            label += f" for {planned[own[0]].label}" if is_trial else f", seed {first.seed}"
            making.append(Planned(label, first, out, is_trial=is_trial))
            for k in own:
                others[k] = planned[k]._replace(branch=out)
    return making, others


def describe_first_rounds(end: int | Plateau) -> str:
    return f"first {end} rounds" if isinstance(end, int) else "rounds before the plateau"


def run_in_turn(planned: Sequence[Planned], show: Show) -> None:
    """Carry out runs one after the other, in this process."""
    width = max((len(own.label) for own in planned), default=0)
    for own in planned:
        with show(own, width) as callbacks:
            perform(own, callbacks)


def perform(planned: Planned, callbacks: Sequence[Callback]) -> bool:
    """Carry out a run; return whether it finished.

    Settings with which clients fail have no value and are not chosen.
    """
    run_directory.wait_for_lock(planned.out)
    branch = planned.branch
    if branch is not None and run_directory.read_summary(branch) is None:
        branch = None  # it failed, as this one will
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "all .* rounds are burn-in"
        )  # warned of once for all runs
        try:
            return planned.run.perform(planned.out, callbacks, branch).finished
        except TooFewClientsError:
            if not planned.is_trial:
                raise
            return True
