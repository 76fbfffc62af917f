"""A sweep: the trials of a search, one after another or side by side, in a directory.

sweep.toml        all settings of the sweep
optuna.journal    the trials, as Optuna keeps them
trials/<number>/  each an ordinary run
trials.csv        one row each: parameters, value
best.toml         the configuration of the best, for `fedpa run --config`
sensitivity.png   the value against each hyperparameter

As the paper chose its hyperparameters, a sweep has two stages: first the rates and the number of
local epochs, on FedAvg; then, with those fixed, burn-in rounds and ρ, on FedPA. Each stage is a
sweep in its own directory; stages.toml above them describes both.
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
from fedpa.training.provenance import differences, flatten
from fedpa.training.run_directory import TRIALS, check_free, lock_directory, wait_for_lock, writing

SWEEP, STAGES, BEST, TABLE = "sweep.toml", "stages.toml", "best.toml", "trials.csv"
STAGE_DIRECTORIES = ("1-fedavg", "2-fedpa")
SAMPLING = ("burn_in_rounds", "rho")
"""What FedAvg does not have."""
NOT_COMPARED = ("run.recording", "run.task_options.data_dir")
"""What changes no number, as in runs."""
MOST_NAMED = 5
"""Largest number of differences that a message lists."""


class Sweep(NamedTuple):
    base: RunConfig
    """What the trials have in common; not resolved, since a field may follow from a swept one."""
    space: Space
    search: Search


class Stages(NamedTuple):
    training: Sweep
    sampling: Sweep
    """Its base has the rates that are used if the first stage chooses none."""


def check_sweep(settings: Sweep) -> Sweep:
    """Refuse what can't be run, before anything is; in a standard form, places absolute."""
    settings = settings._replace(space=spaces.order_space(settings.space))
    resolved = spaces.configure(settings.base, spaces.first_point(settings.space))
    spaces.check_space(settings.space, settings.base)
    base = dataclasses.replace(
        settings.base, task_options=resolved.task_options, init=resolved.init
    )
    return settings._replace(base=base)


def as_table(settings: Sweep | Stages) -> dict[str, Any]:
    """As `sweep.toml` or `stages.toml` has it; of what is swept the space speaks alone."""
    if isinstance(settings, Stages):
        return {name: as_table(stage) for name, stage in settings._asdict().items()}
    run = run_table(settings.base)
    kept = {k: v for k, v in run["hyperparameters"].items() if k not in settings.space}
    return {
        "search": settings.search._asdict(),
        "space": spaces.as_table(settings.space),
        "run": run | {"hyperparameters": kept},
    }


def read_settings(out: Path) -> Sweep | Stages:
    """The sweep, or the stages, of this directory."""
    if (out / STAGES).is_file():
        path = out / STAGES
        values = table_of("out", path)
        try:
            return Stages(*(_parse_sweep(values[name], path) for name in Stages._fields))
        except KeyError as error:
            raise FedpaError(f"{path} is not of a sweep in stages: {error} is missing") from None
    if not (out / SWEEP).is_file():
        raise FedpaError(f"out = {str(out)!r}: contains no sweep to resume; name a task")
    return _parse_sweep(table_of("out", out / SWEEP), out / SWEEP)


def _parse_sweep(values: Mapping[str, Any], path: Path) -> Sweep:
    try:
        kind, trials, seed, prune = (values["search"][name] for name in Search._fields)
        space = spaces.parse_space(values["space"], f"{path} [space]")
        search = choose_search(kind, space, trials, seed, prune)
        base = from_table(dict(values["run"]), f"{path} [run]", of_run=False)
    except FedpaError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise FedpaError(f"{path} is not of a sweep: {error} is missing or wrong") from None
    return Sweep(base, space, search)


def check_place(out: Path, settings: Sweep | Stages) -> None:
    """Refuse a directory that holds something else, or a sweep of other settings.

    Random search and TPE may be given more trials: those that there are stay as they are.
    """
    resumes = f"`fedpa sweep --out {out}` resumes it; for others give another directory"
    if isinstance(settings, Stages):
        if (out / SWEEP).is_file():
            raise FedpaError(
                f"out = {str(out)!r}: contains a sweep without stages: leave --paper out, or give "
                "another directory"
            )
    elif (out / STAGES).is_file():
        raise FedpaError(f"out = {str(out)!r}: contains a sweep in stages: {resumes}")
    path = _settings_path(out, settings)
    if not path.is_file():
        check_free(out, overwrite=False)
        return
    then, now = table_of("out", path), as_table(settings)
    if isinstance(settings, Stages):
        left_out = [f"{stage}.{name}" for stage in Stages._fields for name in NOT_COMPARED]
    else:
        left_out = list(NOT_COMPARED)
        kind, trials, *_ = settings.search
        before = flatten(then).get("search.trials")
        if kind != "grid" and isinstance(before, int) and trials >= before:
            left_out.append("search.trials")
    changed = differences(then, now, left_out)
    if changed:
        more = f"; and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        raise FedpaError(
            f"out = {str(out)!r}: contains a sweep with other settings: "
            f"{'; '.join(changed[:MOST_NAMED])}{more}; {resumes}"
        )


def _settings_path(out: Path, settings: Sweep | Stages) -> Path:
    return out / (STAGES if isinstance(settings, Stages) else SWEEP)


def write_settings(out: Path, settings: Sweep | Stages) -> None:
    """Write down what the directory is for."""
    with writing(out):
        table = tomli_w.dumps(as_table(settings))
        write_atomically(_settings_path(out, settings), table.encode())


@contextlib.contextmanager
def hold_directory(out: Path, settings: Sweep | Stages) -> Iterator[None]:
    """Lock the directory and write the sweep's settings."""
    check_place(out, settings)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        check_place(out, settings)  # another process may have worked there until now
        write_settings(out, settings)
        yield


# --- one trial ---


class Job(NamedTuple):
    """What a process needs to run a trial."""

    out: Path
    config: RunConfig
    metric: str
    """valid/accuracy."""
    past: Sequence[Trial] | None
    """The trials that had ended when it began; None if it is not to be pruned."""
    force: bool = False
    """Resume an interrupted trial although versions or data have changed."""


def find_metric(task: str, problem: Problem) -> str:
    """The metric that decides, the task's: on validation clients, if there are any."""
    return f"{'eval' if problem.validation is None else 'valid'}/{task_named(task).metric}"


def goal(metric: str) -> str:
    """Return the value to maximize: the metric, or minus a loss."""
    return f"−{metric}" if lower_is_better(metric) else metric


def run_trial(job: Job, problem: Problem, *callbacks: Callback) -> Outcome | None:
    """Train or resume a trial to its end; None if it was stopped and can be resumed.

    Settings under which clients fail have no value, and the search continues without them.
    """
    prunes = job.past is not None
    pruning = [make_pruning(job.past or (), job.metric, job.config.rounds)] if prunes else []
    try:
        wait_for_lock(job.out)
        fit = run(
            job.config,
            job.out,
            resuming=True,
            callbacks=[*pruning, *callbacks],
            problem=problem,
            force=job.force,
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
        dict(points) if prunes else {},
        fit.stopped,
        {
            "rounds": len(fit.history),
            "seconds": round(sum(record["seconds"] for record in fit.history), 3),
            **({} if fit.stopped is None else {"stopped": fit.stopped}),
        },
    )


# --- all trials ---


class Watch(NamedTuple):
    """Callbacks for the progress of trials."""

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
    force: bool = False,
) -> list[Trial]:
    """Start a sweep in `out`, or continue the one that it contains; return all trials.

    Finished trials are not run again, and an interrupted one is resumed from its last checkpoint.
    """
    check_integer("jobs", jobs, 1)
    metric = find_metric(settings.base.task, problem)

    with hold_directory(out, settings), contextlib.ExitStack() as stack:
        pool = stack.enter_context(workers(jobs)) if jobs > 1 else None

        def submit(trial: Trial, past: Sequence[Trial], again: bool) -> Future[Outcome | None]:
            callbacks = watch.begin(trial, again)
            config = configure(settings.base, trial.params)
            seen = past if settings.search.prune else None
            job = Job(out / TRIALS / str(trial.number), config, metric, seen, force)
            if pool is not None:
                return pool(run_trial, job, config)
            done: Future[Outcome | None] = Future()
            done.set_result(run_trial(job, problem, *callbacks))
            return done

        return run_trials(settings, out, submit, jobs, watch)


def run_trials(
    settings: Sweep, out: Path, submit: Submit, jobs: int = 1, watch: Watch = Watch()
) -> list[Trial]:
    """Run the missing trials, `jobs` at a time, and write their results."""
    with writing(out):
        study = open_journal(out)
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
        trials = read_trials(study)
        write_results(out, settings, trials)
    return trials


def write_results(out: Path, settings: Sweep, trials: Sequence[Trial]) -> None:
    """Write trials.csv, best.toml and the figure, after every trial."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = ("rounds", "seconds", "stopped")
    writer.writerow(["trial", "state", *settings.space, "value", *columns])
    for trial in trials:
        params = [trial.params[name] for name in settings.space]
        value = "" if trial.value is None else repr(trial.value)
        about = [trial.about.get(name, "") for name in columns]
        writer.writerow([trial.number, trial.state, *params, value, *about])
    write_atomically(out / TABLE, text.getvalue().encode())
    top = find_best(trials)
    if top is not None:
        config = configure(settings.base, top.params)
        write_atomically(out / BEST, write_toml(config).encode())


# --- two stages ---


def split_space(space: Space) -> tuple[Space, Space]:
    """The first stage's hyperparameters, and the second's."""
    first = {name: values for name, values in space.items() if name not in SAMPLING}
    second = {name: values for name, values in space.items() if name in SAMPLING}
    if not first or not second:
        missing = "rate or number of epochs" if not first else "burn_in_rounds or rho"
        raise FedpaError(f"space: --paper has two stages, and there is no {missing} to choose")
    return first, second


def run_stages(
    stages: Stages, out: Path, perform: Callable[[Sweep, Path], Sequence[Trial]]
) -> None:
    """Run both sweeps, the second with the best of the first; its best is that of `out`."""
    first, second = (out / name for name in STAGE_DIRECTORIES)
    with hold_directory(out, stages):
        top = find_best(perform(stages.training, first))
        if top is None:
            raise FedpaError("no trial of the first stage has a value: the second can't begin")
        base = stages.sampling.base
        fixed = dataclasses.replace(base.hyperparameters, **top.params)
        base = dataclasses.replace(base, hyperparameters=fixed)
        trials = perform(stages.sampling._replace(base=base), second)
        if find_best(trials) is not None:
            with writing(out):
                write_atomically(out / BEST, (second / BEST).read_bytes())
