"""Which trial comes next, which is given up early, and the memory of it all: Optuna's part.

What is proposed is a function of the settings, the trial's number and the trials before it; and a
trial is written whole, before it begins, in one line of a journal. So a search that was killed
continues as if nothing had happened. Optuna is imported where it is used: other commands should not
wait for it.
"""

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from fedpa.errors import FedpaError, check_integer, explain, find_name, refuse
from fedpa.experiments.sweeps.space import Interval, Params, Space, is_whole, point, size
from fedpa.metrics.metric import lower_is_better
from fedpa.training.callbacks import Answer, Event, Remembering, Stop

if TYPE_CHECKING:
    import optuna

Kind = Literal["grid", "random", "tpe"]
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


@contextlib.contextmanager
def open_journal(out: Path) -> Iterator["optuna.Study"]:
    """The journal of the sweep in `out`, created if there is none; the process holds `out`.

    A journal, not a database: a line that a kill cut short can be removed. Optuna's lock on it, if
    a kill left it behind, is released after the grace period.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    with quiet():
        path = out / JOURNAL
        try:
            drop_cut_line(path)
            lock = JournalFileOpenLock(str(path), grace_period=GRACE)
            storage = JournalStorage(JournalFileBackend(str(path), lock))
            yield optuna.create_study(
                storage=storage,
                study_name=STUDY,
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.RandomSampler(),  # never asked; the default one computes
            )
        except OSError as error:
            raise FedpaError(f"{path} can't be written: {explain(error)}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's log; what is worth saying is said by us."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def drop_cut_line(path: Path) -> None:
    """Remove a last line without an end: Optuna would append to it, and lose what follows."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_trials(study: "optuna.Study") -> list[Trial]:
    """All trials so far, by number."""
    states: dict[str, State] = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}
    return [
        Trial(
            trial.number,
            dict(trial.params),
            states.get(trial.state.name, "running"),
            trial.value if trial.state.name == "COMPLETE" else None,
            dict(trial.intermediate_values),
            dict(trial.user_attrs),
        )
        for trial in study.get_trials(deepcopy=False)
    ]


def begin_trial(study: "optuna.Study", space: Space, search: Search) -> Trial:
    """The next trial, written down."""
    import optuna

    past = read_trials(study)
    params = propose(space, search, past)
    frozen = optuna.trial.create_trial(
        state=optuna.trial.TrialState.RUNNING,
        params=params,
        distributions=_distributions(space),
    )
    study.add_trial(frozen)
    return Trial(len(past), params, "running", None, {})


def end_trial(study: "optuna.Study", number: int, outcome: Outcome) -> Trial:
    """What came of a trial, written down; whatever a kill left of an earlier attempt is kept."""
    import optuna

    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.Trial(study, frozen._trial_id)
    for name, value in outcome.about.items():
        trial.set_user_attr(name, value)
    for step, value in outcome.curve.items():
        if step not in frozen.intermediate_values:
            trial.report(value, step)
    states = optuna.trial.TrialState
    if outcome.stopped is not None and outcome.stopped.startswith(PRUNED):
        study.tell(number, state=states.PRUNED)
    elif math.isfinite(outcome.value):
        study.tell(number, outcome.value)
    else:
        study.tell(number, state=states.FAIL)
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
    import optuna

    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    sampler: optuna.samplers.BaseSampler
    if search.kind == "random":
        sampler = optuna.samplers.RandomSampler(seed=seed)
    else:
        sampler = optuna.samplers.TPESampler(seed=seed)
    with quiet():
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_frozen(space, trial) for trial in past])
        return study.ask(_distributions(space)).params


def make_pruning(past: Sequence[Trial], metric: str, rounds: int) -> Remembering:
    """End a run whose best value so far is below the median of the trials that came to their end.

    Not in the first quarter of the rounds, in which much is still open. It compares with the trials
    that had ended when this one began, and remembers its own values: a run that was cut and resumed
    is judged as one that was not.
    """
    import optuna

    with quiet():
        study = optuna.create_study(direction="maximize")
        study.add_trials([_frozen({}, trial) for trial in past if trial.state == "finished"])
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
    valued = [(trial.value, trial) for trial in trials if trial.value is not None]
    return max(valued, key=lambda pair: (pair[0], -pair[1].number))[1] if valued else None


def _distributions(space: Space) -> "dict[str, optuna.distributions.BaseDistribution]":
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    found: dict[str, BaseDistribution] = {}
    for name, values in space.items():
        if not isinstance(values, Interval):
            found[name] = CategoricalDistribution(values)
        elif is_whole(name):
            found[name] = IntDistribution(int(values.low), int(values.high), log=values.log)
        else:
            found[name] = FloatDistribution(values.low, values.high, log=values.log)
    return found


def _frozen(space: Space, trial: Trial) -> "optuna.trial.FrozenTrial":
    """A trial as Optuna has it, to be put into a study in memory."""
    import optuna

    states = optuna.trial.TrialState
    state = {
        "running": states.RUNNING,
        "finished": states.COMPLETE,
        "pruned": states.PRUNED,
        "failed": states.FAIL,
    }[trial.state]
    return optuna.trial.create_trial(
        state=state,
        value=trial.value,
        params={name: trial.params[name] for name in space},
        distributions=_distributions(space),
        intermediate_values=dict(trial.curve),
    )
