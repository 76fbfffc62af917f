"""One trial: an ordinary run in a directory of its own, begun, gone on with or read back."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedpa.errors import FedpaError, TooFewClientsError
from fedpa.report.summary import curve, final
from fedpa.sweeps.search import Outcome, Trial, pruning
from fedpa.tasks.task import Problem, preset_named, task_named
from fedpa.training import checkpoints, run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.config import RunConfig
from fedpa.training.lock import LOCK, locked
from fedpa.training.loop import Fit
from fedpa.training.run import resume, run

PATIENCE = 10.0
"""Seconds until a process that was killed with the sweep has let go of its trial."""


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


def chosen_on(task: str, problem: Problem) -> str:
    """The metric that decides: on validation clients, if there are any."""
    return f"{'eval' if problem.validation is None else 'valid'}/{task_named(task).metric}"


def performed(job: Job, problem: Problem, callbacks: Sequence[Callback] = ()) -> Outcome | None:
    """Train to the end, from wherever it is; None if a callback broke it off, to be resumed.

    Settings under which clients fail have no value, and the search goes on without them.
    """
    pruned = [pruning(job.past, job.metric, job.config.rounds)] if job.prune else []
    try:
        fit = _trained(job, problem, [*pruned, *callbacks])
    except TooFewClientsError as error:
        return Outcome(math.nan, {}, str(error), {"stopped": str(error)})
    if not fit.finished:
        return None
    # Many trials, which seldom go on: what `fedpa resume` and the best round need is kept.
    best = (run_directory.read_summary(job.out) or {}).get("best")
    checkpoints.prune(job.out, 1, [best["round"]] if best else [])
    last = preset_named(job.config.task, job.config.preset)[1].last
    measured = curve(fit.history, job.metric)
    points = zip(measured.rounds.tolist(), measured.values.tolist(), strict=True)
    return Outcome(
        final(measured, last),
        dict(points) if job.prune else {},
        fit.stopped,
        {
            "rounds": len(fit.history),
            "seconds": round(sum(record["seconds"] for record in fit.history), 3),
            **({} if fit.stopped is None else {"stopped": fit.stopped}),
        },
    )


def _trained(job: Job, problem: Problem, watching: Sequence[Callback]) -> Fit:
    if run_directory.is_run(job.out):
        _check_same(job)
        _wait_for(job.out)
        return resume(job.out, anyway=job.anyway, callbacks=watching, problem=problem)
    # Of a run that was cut before it had a configuration nothing is worth keeping.
    return run(job.config, job.out, overwrite=True, callbacks=watching, problem=problem)


def _check_same(job: Job) -> None:
    """A directory of this number may be of another sweep, whose journal somebody removed."""
    settings, _ = run_directory.read_config(job.out)
    then = settings.get("hyperparameters", {})
    for name, before in then.items():
        value = getattr(job.config.hyperparameters, name, None)
        if before != value:
            raise FedpaError(
                f"{str(job.out)!r} is a run with {name} = {before!r}, not {value!r}: "
                "remove it, or give another directory"
            )


def _wait_for(out: Path) -> None:
    end = time.monotonic() + PATIENCE
    while (out / LOCK).exists():
        try:
            with locked(out):
                return
        except FedpaError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
