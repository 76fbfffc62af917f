"""Which trial comes next, which is given up early, and the memory of it all: Optuna's part.

What is proposed is a function of the settings, the trial's number and the trials before it; and a
trial is written whole, before it begins, in one line of a journal. So a search that was killed
continues as if nothing had happened. Optuna is imported where it is used: other commands should not
wait for it.
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
"""Seconds after which the journal's lock is known to be of a process that was killed."""
TRIALS = 20
"""Of random search and TPE, if not said."""
MOST = 100_000
"""Points of a grid: more are a mistake."""
PRUNED = "pruned: "
"""How the reason begins for which a run was given up."""
BEFORE_PRUNING = 4
"""Trials that come to their end before one may be given up."""


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
    """What is to be as high as possible; None unless the trial is finished."""
    curve: Mapping[int, float]
    """Round → the metric, as far as it went."""
    about: Mapping[str, Any] = {}
    """What else is worth a column."""


class Outcome(NamedTuple):
    """What came of a trial's run."""

    value: float
    curve: Mapping[int, float]
    stopped: str | None = None
    """Why it ended before its last round."""
    about: Mapping[str, Any] = {}


def choose_search(
    kind: str, space: Space, trials: int | None, seed: int, prune: bool = False
) -> Search:
    """The search as asked for; what does not go together is refused."""
    points = size(space)
    kind = find_name("search", kind, get_args(Kind))
    check_integer("search_seed", seed, 0)
    if trials is not None:
        check_integer("trials", trials, 1)
    if kind == "grid":
        if points is None:
            names = [name for name, values in space.items() if isinstance(values, Interval)]
            raise refuse(
                "search", kind, f"{names[0]} is an interval: list its values, or take random or tpe"
            )
        if points > MOST:
            raise refuse("search", kind, f"the grid has {points:,} points: take random or tpe")
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
    """Import Optuna without its log: what is worth saying is said by us."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_journal(out: Path) -> "optuna.Study":
    """The journal of the sweep in `out`, created if there is none; the process holds `out`.

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
    """All trials so far, by number."""
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
    """The next trial, written down."""
    past = read_trials(study)
    trial = Trial(len(past), propose(space, search, past), "running", None, {})
    study.add_trial(_freeze(space, trial))
    return trial


def end_trial(study: "optuna.Study", number: int, outcome: Outcome) -> Trial:
    """What came of a trial, written down; whatever a kill left of an earlier attempt is kept."""
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
    """End a run whose best value so far is below the median of the trials that came to their end.

    Not in the first quarter of the rounds, in which much is still open. It compares with the trials
    that had ended when this one began, and remembers its own values: a run that was cut and resumed
    is judged as one that was not.
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
