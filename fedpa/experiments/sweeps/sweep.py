"""A sweep: the trials of a search, one after another or side by side, in a directory.

sweep.toml        everything that decides the trials
optuna.journal    the trials, as Optuna keeps them
trials/<number>/  each an ordinary run
trials.csv        one row each: parameters, value
best.toml         the configuration of the best, for `fedpa run --config`
sensitivity.png   the value against each hyperparameter
"""

import contextlib
import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, TooFewClientsError, check_integer
from fedpa.experiments.config import RunConfig, from_table, table_of, write_toml
from fedpa.experiments.config import as_table as run_table
from fedpa.experiments.report.curves import compute_finals, read_curve
from fedpa.experiments.run import run
from fedpa.experiments.sweeps import space as spaces
from fedpa.experiments.sweeps.search import (
    Outcome,
    Search,
    Trial,
    begin_trial,
    choose_search,
    end_trial,
    find_best,
    make_pruning,
    open_journal,
    read_trials,
)
from fedpa.experiments.sweeps.space import Space, configure
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import workers
from fedpa.metrics.metric import lower_is_better
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoint import prune_checkpoints
from fedpa.training.problem import Problem
from fedpa.training.provenance import differences
from fedpa.training.run_directory import TRIALS, check_free, lock_directory, wait_for_lock, writing

SWEEP, BEST, TABLE = "sweep.toml", "best.toml", "trials.csv"
NOT_COMPARED = ("run.recording", "run.task_options.data_dir")
"""What changes no number, as in runs."""
MOST_NAMED = 5
"""Differences that are told one by one."""


class Sweep(NamedTuple):
    base: RunConfig
    """What the trials have in common; not resolved, since a field may follow from a swept one."""
    space: Space
    search: Search
    by: str | None = None
    """The metric that decides, loss say; the task's own if not given."""


def check_sweep(settings: Sweep) -> Sweep:
    """Refuse what can't be run, before anything is; in a standard form, places absolute."""
    settings = settings._replace(space=spaces.order_space(settings.space))
    resolved = spaces.configure(settings.base, spaces.first_point(settings.space))
    spaces.check_space(settings.space, settings.base)
    base = dataclasses.replace(
        settings.base, task_options=resolved.task_options, init=resolved.init
    )
    return settings._replace(base=base)


def as_table(settings: Sweep) -> dict[str, Any]:
    """As `sweep.toml` has it; of what is swept the space speaks alone."""
    run = run_table(settings.base)
    kept = {k: v for k, v in run["hyperparameters"].items() if k not in settings.space}
    return {
        **({} if settings.by is None else {"by": settings.by}),
        "search": settings.search._asdict(),
        "space": spaces.as_table(settings.space),
        "run": run | {"hyperparameters": kept},
    }


def is_sweep(out: Path) -> bool:
    return (out / SWEEP).is_file()


def has_stages(out: Path) -> bool:
    """Whether sweeps lie below it."""
    return any(out.glob(f"*/{SWEEP}"))


def read_settings(out: Path) -> Sweep:
    """The sweep in this directory."""
    path = out / SWEEP
    return parse_sweep(table_of("out", path), path)


def parse_sweep(values: Mapping[str, Any], path: Path) -> Sweep:
    """A sweep from what `as_table` gives, as it was found in a file."""
    try:
        search, run = dict(values["search"]), dict(values["run"])
        space = spaces.parse_space(values["space"], f"{path} [space]")
        found = choose_search(
            search["kind"], space, search["trials"], search["seed"], search["prune"]
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, FedpaError):
            raise
        raise FedpaError(f"{path} is not of a sweep: {error} is missing or wrong") from None
    by = None if values.get("by") is None else str(values["by"])
    return Sweep(from_table(run, f"{path} [run]", of_run=False), space, found, by)


def check_place(out: Path, settings: Sweep) -> None:
    """Refuse a directory that holds something else, or a sweep of other settings.

    Random search and TPE may be given more trials: those that there are stay as they are.
    """
    if not is_sweep(out):
        if has_stages(out):
            raise FedpaError(
                f"out = {str(out)!r}: holds a sweep in stages: `fedpa sweep --out {out}` goes on "
                "with it; give another directory"
            )
        check_free(out, overwrite=None)
        return
    then, now = table_of("out", out / SWEEP), as_table(settings)
    left_out = list(NOT_COMPARED)
    try:
        fewer = settings.search.trials < then["search"]["trials"]
    except (KeyError, TypeError):
        fewer = True
    if settings.search.kind != "grid" and not fewer:
        left_out.append("search.trials")
    check_same(out, then, now, left_out)


def check_same(
    out: Path, then: Mapping[str, Any], now: Mapping[str, Any], left_out: Sequence[str]
) -> None:
    """Refuse other settings than those of the sweep in the directory."""
    changed = differences(then, now, left_out)
    if changed:
        more = f"; and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        raise FedpaError(
            f"out = {str(out)!r}: holds a sweep of other settings: "
            f"{'; '.join(changed[:MOST_NAMED])}{more}; `fedpa sweep --out {out}` resumes it; "
            "for others give another directory"
        )


def write_settings(out: Path, settings: Sweep) -> None:
    with writing(out):
        write_atomically(out / SWEEP, tomli_w.dumps(as_table(settings)).encode())


class Job(NamedTuple):
    """All that a process needs to know of a trial."""

    out: Path
    config: RunConfig
    metric: str
    """valid/accuracy."""
    prune: bool
    past: Sequence[Trial]
    """The trials that had ended when it began."""
    anyway: bool = False
    """Go on with a trial that was cut although versions or data are not what they were."""


def find_metric(task: str, problem: Problem, by: str | None = None) -> str:
    """The metric that decides, by default the task's: on validation clients, if there are any."""
    return f"{'eval' if problem.validation is None else 'valid'}/{by or task_named(task).metric}"


def goal(metric: str) -> str:
    """What is to be as high as possible, by name: of a loss, what is below zero."""
    return f"−{metric}" if lower_is_better(metric) else metric


def run_trial(job: Job, problem: Problem, *callbacks: Callback) -> Outcome | None:
    """Train to the end, from wherever it is; None if a callback broke it off, to be resumed.

    Settings under which clients fail have no value, and the search continues without them.
    """
    pruned = [make_pruning(job.past, job.metric, job.config.rounds)] if job.prune else []
    try:
        wait_for_lock(job.out)
        fit = run(
            job.config,
            job.out,
            resuming=True,
            callbacks=[*pruned, *callbacks],
            problem=problem,
            anyway=job.anyway,
        )
    except TooFewClientsError as error:
        return Outcome(math.nan, {}, str(error), {"stopped": str(error)})
    if not fit.finished:
        return None
    # Many trials, which are seldom resumed: what `fedpa resume` and the best round need is kept.
    prune_checkpoints(job.out, 1, [] if fit.best is None else [fit.best["round"]])
    last = preset_named(job.config.task, job.config.preset)[1].last
    measured, sign = read_curve(fit.history, job.metric), -1 if lower_is_better(job.metric) else 1
    points = zip(measured.rounds.tolist(), (sign * measured.values).tolist(), strict=True)
    return Outcome(
        sign * compute_finals([measured], last)[0],
        dict(points) if job.prune else {},
        fit.stopped,
        {
            "rounds": len(fit.history),
            "seconds": round(sum(record["seconds"] for record in fit.history), 3),
            **({} if fit.stopped is None else {"stopped": fit.stopped}),
        },
    )


class Watch(NamedTuple):
    """Who is told of the trials."""

    begin: Callable[[Trial, bool], Sequence[Callback]] = lambda trial, again: ()
    """A trial begins, perhaps again; gives callbacks for rounds run in this process."""
    end: Callable[[Trial, Sequence[Trial]], None] = lambda trial, all: None
    """A trial has ended; with all there are."""


Submit = Callable[[Trial, Sequence[Trial], bool], "Future[Outcome | None]"]
"""(trial, those before it, whether it was begun before) → what will come of it."""


def sweep(
    settings: Sweep,
    out: Path,
    problem: Problem,
    *,
    jobs: int = 1,
    watch: Watch = Watch(),
    anyway: bool = False,
) -> list[Trial]:
    """Begin a sweep in `out`, or go on with the one that is there; all its trials.

    However often it was killed, finished trials are not run again and a cut one goes on from its
    last checkpoint.
    """
    check_integer("jobs", jobs, 1)
    metric = find_metric(settings.base.task, problem, settings.by)

    def job(trial: Trial, past: Sequence[Trial]) -> Job:
        config = configure(settings.base, trial.params)
        place = out / TRIALS / str(trial.number)
        curves = past if settings.search.prune else ()
        return Job(place, config, metric, settings.search.prune, curves, anyway)

    with hold_directory(out, settings), contextlib.ExitStack() as stack:
        pool = stack.enter_context(workers(jobs)) if jobs > 1 else None

        def submit(trial: Trial, past: Sequence[Trial], again: bool) -> Future[Outcome | None]:
            callbacks, work = watch.begin(trial, again), job(trial, past)
            if pool is not None:
                return pool(run_trial, work, work.config)
            done: Future[Outcome | None] = Future()
            done.set_result(run_trial(work, problem, *callbacks))
            return done

        return run_trials(settings, out, submit, jobs, watch)


@contextlib.contextmanager
def hold_directory(out: Path, settings: Sweep) -> Iterator[None]:
    """One process at a time sweeps in a directory, which says what it is for."""
    check_place(out, settings)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        check_place(out, settings)  # another process may have worked there until now
        write_settings(out, settings)
        yield


def run_trials(
    settings: Sweep, out: Path, submit: Submit, jobs: int = 1, watch: Watch = Watch()
) -> list[Trial]:
    """Run the trials that are missing, `jobs` at a time, and write down what came of each."""
    with open_journal(out) as study:
        cut = [trial for trial in read_trials(study) if trial.state == "running"]
        pending: dict[Future[Outcome | None], Trial] = {}
        while True:
            while len(pending) < jobs:
                again = bool(cut)
                if cut:
                    trial = cut.pop(0)
                elif len(read_trials(study)) < settings.search.trials:
                    trial = begin_trial(study, settings.space, settings.search)
                else:
                    break
                past = [other for other in read_trials(study) if other.state != "running"]
                pending[submit(trial, past, again)] = trial
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: pending[future].number):
                number, outcome = pending.pop(future).number, future.result()
                if outcome is None:
                    raise KeyboardInterrupt
                trial = end_trial(study, number, outcome)
                write_results(out, settings, read_trials(study))
                watch.end(trial, read_trials(study))
        found = read_trials(study)
        write_results(out, settings, found)
    return found


def write_results(out: Path, settings: Sweep, trials: Sequence[Trial]) -> None:
    """What is known so far, after every trial."""
    with writing(out):
        write_atomically(out / TABLE, as_csv(settings, trials).encode())
        config = best_config(settings, trials)
        if config is not None:
            write_atomically(out / BEST, write_toml(config).encode())


def best_config(settings: Sweep, trials: Sequence[Trial]) -> RunConfig | None:
    top = find_best(trials)
    return None if top is None else configure(settings.base, top.params)


def as_csv(settings: Sweep, trials: Sequence[Trial]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = list(settings.space)
    writer.writerow(["trial", "state", *names, "value", "rounds", "seconds", "stopped"])
    for trial in trials:
        about = [trial.about.get(name, "") for name in ("rounds", "seconds", "stopped")]
        value = "" if trial.value is None else repr(trial.value)
        params = [trial.params[name] for name in names]
        writer.writerow([trial.number, trial.state, *params, value, *about])
    return text.getvalue()
