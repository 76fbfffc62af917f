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
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

from fedpa.errors import check_integer
from fedpa.experiments.config import RunConfig, write_toml
from fedpa.experiments.sweeps.search import Outcome, Trial, begun, best, ended, opened, trials
from fedpa.experiments.sweeps.settings import Sweep, check_place, write_settings
from fedpa.experiments.sweeps.space import configured
from fedpa.experiments.sweeps.trial_run import Job, chosen_on, performed, performed_alone
from fedpa.experiments.workers import workers
from fedpa.training.callbacks import Callback
from fedpa.training.lock import locked
from fedpa.training.problem import Problem
from fedpa.training.run_directory import TRIALS, writing
from fedpa.training.whole_files import write_atomically

BEST, TABLE = "best.toml", "trials.csv"


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
    metric = chosen_on(settings.base.task, problem, settings.by)

    def job(trial: Trial, past: Sequence[Trial]) -> Job:
        config = configured(settings.base, trial.params)
        place = out / TRIALS / str(trial.number)
        curves = past if settings.search.prune else ()
        return Job(place, config, metric, settings.search.prune, curves, anyway)

    with holding(out, settings), contextlib.ExitStack() as stack:
        if jobs == 1:

            def submit(trial: Trial, past: Sequence[Trial], again: bool) -> Future[Outcome | None]:
                done: Future[Outcome | None] = Future()
                callbacks = watch.begin(trial, again)
                done.set_result(performed(job(trial, past), problem, callbacks))
                return done

        else:
            pool = stack.enter_context(workers(jobs))

            def submit(trial: Trial, past: Sequence[Trial], again: bool) -> Future[Outcome | None]:
                watch.begin(trial, again)
                work = job(trial, past)
                return pool(performed_alone, work, work.config)

        found = searched(settings, out, submit, jobs, watch)
    return found


@contextlib.contextmanager
def holding(out: Path, settings: Sweep) -> Iterator[None]:
    """One process at a time sweeps in a directory, which says what it is for."""
    check_place(out, settings)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        check_place(out, settings)  # somebody may have been there until now
        write_settings(out, settings)
        yield


def searched(
    settings: Sweep, out: Path, submit: Submit, jobs: int = 1, watch: Watch = Watch()
) -> list[Trial]:
    """Run the trials that are missing, so many at a time, and write down what came of each."""
    with opened(out) as study:
        cut = [trial for trial in trials(study) if trial.state == "running"]
        pending: dict[Future[Outcome | None], Trial] = {}
        while True:
            while len(pending) < jobs:
                again = bool(cut)
                if cut:
                    trial = cut.pop(0)
                elif len(trials(study)) < settings.search.trials:
                    trial = begun(study, settings.space, settings.search)
                else:
                    break
                past = [other for other in trials(study) if other.state != "running"]
                pending[submit(trial, past, again)] = trial
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: pending[future].number):
                number, outcome = pending.pop(future).number, future.result()
                if outcome is None:
                    raise KeyboardInterrupt
                trial = ended(study, number, outcome)
                write_results(out, settings, trials(study))
                watch.end(trial, trials(study))
        found = trials(study)
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
    top = best(trials)
    return None if top is None else configured(settings.base, top.params)


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
