"""One trial: an ordinary run in a directory of its own, begun, gone on with or read back."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedpa.errors import TooFewClientsError
from fedpa.experiments.config import RunConfig
from fedpa.experiments.report.summary import curve, final
from fedpa.experiments.run import run_or_resume
from fedpa.experiments.sweeps.search import Outcome, Trial, pruning
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.metrics.metric import lower_is_better
from fedpa.training import checkpoints
from fedpa.training.callbacks import Callback
from fedpa.training.lock import wait_for
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem


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


def chosen_on(task: str, problem: Problem, by: str | None = None) -> str:
    """The metric that decides, by default the task's: on validation clients, if there are any."""
    return f"{'eval' if problem.validation is None else 'valid'}/{by or task_named(task).metric}"


def goal(metric: str) -> str:
    """What is to be as high as possible, by name: of a loss, what is below zero."""
    return f"−{metric}" if lower_is_better(metric) else metric


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
    # Many trials, which are seldom resumed: what `fedpa resume` and the best round need is kept.
    checkpoints.prune(job.out, 1, [] if fit.best is None else [fit.best["round"]])
    last = preset_named(job.config.task, job.config.preset)[1].last
    measured, sign = curve(fit.history, job.metric), -1 if lower_is_better(job.metric) else 1
    points = zip(measured.rounds.tolist(), (sign * measured.values).tolist(), strict=True)
    return Outcome(
        sign * final(measured, last),
        dict(points) if job.prune else {},
        fit.stopped,
        {
            "rounds": len(fit.history),
            "seconds": round(sum(record["seconds"] for record in fit.history), 3),
            **({} if fit.stopped is None else {"stopped": fit.stopped}),
        },
    )


def performed_alone(job: Job, problem: Problem, look: Callback) -> Outcome | None:
    """The same in a worker process."""
    return performed(job, problem, [look])


def _trained(job: Job, problem: Problem, watching: Sequence[Callback]) -> Fit:
    wait_for(job.out)
    return run_or_resume(
        job.config, job.out, callbacks=watching, problem=problem, anyway=job.anyway
    )
