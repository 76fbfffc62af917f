"""Proposals, pruning and the journal of trials, with Optuna.

A proposal is a function of the settings, the trial's number and the trials before it, and a trial
is written to one line of a journal before it starts. So a search that was killed continues exactly.
Optuna is imported on first use, so that other commands do not wait for it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fedpa.errors import check_integer, find_name, refuse
from fedpa.experiments.sweeps.space import (
    Choices,
    Interval,
    Kind,
    Params,
    Space,
    is_whole,
    point,
    size,
)
from fedpa.metrics.metric import lower_is_better
from fedpa.training.callbacks import Answer, Event, Remembering, Stop

if TYPE_CHECKING:
    import optuna

State = Literal["running", "finished", "pruned", "failed"]
JOURNAL = "optuna.journal"
STUDY = "sweep"
GRACE = 3
"""Seconds after which the journal's lock counts as left by a killed process."""
TRIALS = 20
"""Default number of trials of random search and TPE."""
MOST = 100_000
"""Largest number of points of a grid."""
PRUNED = "pruned: "
"""Start of the reason of a pruned run."""
BEFORE_PRUNING = 4
"""Finished trials needed before one may be pruned."""


class Search(NamedTuple):
    """How a space is searched."""

    kind: Kind
    trials: int
    seed: int
    prune: bool


class Trial(NamedTuple):
    number: int
    """From 0."""
    params: Params
    state: State
    value: float | None
    """The value to maximize; None unless the trial is finished."""
    curve: Mapping[int, float]
    """Round → the metric."""
    about: Mapping[str, Any] = {}
    """Further columns of trials.csv."""


class Outcome(NamedTuple):
    """The result of a trial's run."""

    value: float
    curve: Mapping[int, float]
    stopped: str | None = None
    """Why it ended before its last round."""
    about: Mapping[str, Any] = {}


def choose_search(
    kind: str, space: Space, trials: int | None, seed: int, prune: bool = False
) -> Search:
    """Make the search; refuses contradictory options."""
    points = size(space)
    kind = find_name("search", kind, get_args(Kind))
    check_integer("search_seed", seed, 0)
    if trials is not None:
        check_integer("trials", trials, 1)
    if kind == "grid":
        if points is None:
            names = [name for name, values in space.items() if isinstance(values, Interval)]
            raise refuse(
                "search", kind, f"{names[0]} is an interval: list its values, or use random or tpe"
            )
        if points > MOST:
            raise refuse("search", kind, f"the grid has {points:,} points: use random or tpe")
        if trials not in (None, points):
            raise refuse("trials", trials, f"the grid has {points} points: leave it out")
        return Search("grid", points, seed, prune)
    if kind == "random":
        few = points if points is not None and points <= MOST else None
        if few is not None and trials is not None and trials > few:
            raise refuse("trials", trials, f"the space has only {few} points")
        return Search("random", trials or min(TRIALS, few or TRIALS), seed, prune)
    return Search("tpe", trials or TRIALS, seed, prune)


def load_optuna() -> Any:
    """Import Optuna without its log."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_journal(out: Path) -> "optuna.Study":
    """Open or create the journal of the sweep in `out`, whose lock the process holds.

    A journal, not a database: a line that a kill cut short can be removed. Optuna's lock on it, if
    a kill left it behind, is released after the grace period.
    """
    optuna = load_optuna()
    path = out / JOURNAL
    drop_cut_line(path)
    journal = optuna.storages.journal
    lock = journal.JournalFileOpenLock(str(path), grace_period=GRACE)
    return optuna.create_study(  # type: ignore[no-any-return]
        storage=optuna.storages.JournalStorage(journal.JournalFileBackend(str(path), lock)),
        study_name=STUDY,
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(),  # never asked; the default one computes
    )


def drop_cut_line(path: Path) -> None:
    """Remove a last line without an end: Optuna would append to it, and lose what follows."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_trials(study: "optuna.Study") -> list[Trial]:
    """List all trials so far, by number."""
    return [
        Trial(
            trial.number,
            trial.params,
            _STATES[trial.state.name],
            trial.value if trial.state.name == "COMPLETE" else None,
            trial.intermediate_values,
            trial.user_attrs,
        )
        for trial in study.get_trials()
    ]


def begin_trial(study: "optuna.Study", space: Space, search: Search) -> Trial:
    """Propose the next trial and write it to the journal."""
    past = read_trials(study)
    trial = Trial(len(past), propose(space, search, past), "running", None, {})
    study.add_trial(_freeze(space, trial))
    return trial


def end_trial(study: "optuna.Study", number: int, outcome: Outcome) -> Trial:
    """Write a trial's result to the journal; reports of an earlier attempt are kept."""
    optuna = load_optuna()
    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.Trial(study, frozen._trial_id)
    for name, value in outcome.about.items():
        trial.set_user_attr(name, value)
    for step, value in outcome.curve.items():
        if step not in frozen.intermediate_values:
            trial.report(value, step)
    if outcome.stopped is not None and outcome.stopped.startswith(PRUNED):
        study.tell(number, state=optuna.trial.TrialState.PRUNED)
    elif math.isfinite(outcome.value):
        study.tell(number, outcome.value)
    else:
        study.tell(number, state=optuna.trial.TrialState.FAIL)
    return read_trials(study)[number]


def propose(space: Space, search: Search, past: Sequence[Trial]) -> Params:
    """The parameters of trial number len(past), whose predecessors are `past`."""
    number, points = len(past), size(space)
    if search.kind == "grid":
        return point(space, number)
    if search.kind == "random" and points is not None and points <= MOST:
        # No point twice: the same settings give the same value.
        order = np.random.default_rng(search.seed).permutation(points)
        return point(space, int(order[number]))
    samplers = load_optuna().samplers
    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    kind = samplers.RandomSampler if search.kind == "random" else samplers.TPESampler
    study = _make_study([_freeze(space, trial) for trial in past], kind(seed=seed))
    return study.ask(_distributions(space)).params


def make_pruning(past: Sequence[Trial], metric: str, rounds: int) -> Remembering:
    """Make a callback that ends a run whose best value is below the median of finished trials.

    It does not prune in the first quarter of the rounds. It compares with the trials that had
    finished when this one started, and keeps its own values in checkpoints, so that a resumed run
    is pruned like an uninterrupted one.
    """
    optuna = load_optuna()
    study = _make_study([_freeze({}, trial) for trial in past if trial.state == "finished"])
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=BEFORE_PRUNING, n_warmup_steps=rounds // 4
    )

    def update(memory: Any, event: Event) -> tuple[Any, Answer]:
        value = event.record.get(metric)
        if value is None:
            return memory, None
        memory = [*memory, [event.round, -value if lower_is_better(metric) else value]]
        if event.round >= rounds:
            return memory, None
        running = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING, intermediate_values=dict(map(tuple, memory))
        )
        if not pruner.prune(study, running):
            return memory, None
        reason = f"{metric} was worse than the others' median in round {event.round}"
        return memory, Stop(PRUNED + reason)

    return Remembering("pruning", [], update)


def find_best(trials: Sequence[Trial]) -> Trial | None:
    """The finished trial of the highest value; of several the first."""
    valued = [(trial.value, -trial.number, trial) for trial in trials if trial.value is not None]
    return max(valued, key=lambda entry: entry[:2])[2] if valued else None


def _distributions(space: Space) -> dict[str, Any]:
    kinds = load_optuna().distributions

    def distribution(name: str, values: Choices | Interval) -> Any:
        if not isinstance(values, Interval):
            return kinds.CategoricalDistribution(values)
        kind = kinds.IntDistribution if is_whole(name) else kinds.FloatDistribution
        return kind(*values)

    return {name: distribution(name, values) for name, values in space.items()}


_STATES: dict[str, State] = {
    "RUNNING": "running",
    "COMPLETE": "finished",
    "PRUNED": "pruned",
    "FAIL": "failed",
}


def _freeze(space: Space, trial: Trial) -> "optuna.trial.FrozenTrial":
    """A trial as Optuna has it."""
    trials = load_optuna().trial
    names = {state: name for name, state in _STATES.items()}
    frozen: optuna.trial.FrozenTrial = trials.create_trial(
        state=trials.TrialState[names[trial.state]],
        value=trial.value,
        params={name: trial.params[name] for name in space},
        distributions=_distributions(space),
        intermediate_values=dict(trial.curve),
    )
    return frozen


def _make_study(trials: Sequence[Any], sampler: Any = None) -> "optuna.Study":
    """A study in memory."""
    study: optuna.Study = load_optuna().create_study(direction="maximize", sampler=sampler)
    study.add_trials(trials)
    return study
