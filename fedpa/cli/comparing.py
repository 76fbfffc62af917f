"""The runs of a comparison, one after the other or several at a time."""

import contextlib
import multiprocessing
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fedpa.cli.arguments import shown
from fedpa.report.live import watched
from fedpa.tasks.options import TaskOptions
from fedpa.tasks.task import Problem, task_named
from fedpa.training import run_directory
from fedpa.training.config import RunConfig
from fedpa.training.history import History
from fedpa.training.run import run_or_resume


class Planned(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    burn_in: RunConfig | None
    """The run that makes its first rounds, where others begin with the same."""


def carried_out(
    planned: Sequence[Planned],
    out: Path,
    problems: Mapping[TaskOptions, Problem],
    jobs: int,
    console: Console,
    quiet: bool,
) -> list[History]:
    """The history of each run, in order. What is finished is not run again."""
    first = _burn_ins(planned, out)
    try:
        for stage in (list(first.values()), [_after(plan, first) for plan in planned]):
            if jobs > 1 and len(stage) > 1:
                _side_by_side(stage, jobs, console, quiet)
            else:
                _in_turn(stage, problems, console, quiet)
    except KeyboardInterrupt:
        done = sum(run_directory.read_summary(plan.out) is not None for plan in planned)
        print(
            f"interrupted, {done} of {len(planned)} runs are finished: the same command with "
            f"--out {shown(out)} goes on",
            file=sys.stderr,
        )
        sys.exit(130)
    return [run_directory.read_metrics(plan.out) for plan in planned]


class _Run(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    branch: Path | None


def _burn_ins(planned: Sequence[Planned], out: Path) -> dict[str, _Run]:
    """The runs that make the first rounds of several others."""
    found: dict[str, _Run] = {}
    for plan in planned:
        if plan.burn_in is not None and repr(plan.burn_in) not in found:
            place = out / run_directory.BURN_IN / f"{plan.burn_in.seed}-{len(found)}"
            label = f"first {plan.burn_in.rounds} rounds, seed {plan.burn_in.seed}"
            found[repr(plan.burn_in)] = _Run(label, plan.burn_in, place, None)
    return found


def _after(plan: Planned, first: Mapping[str, _Run]) -> _Run:
    branch = None if plan.burn_in is None else first[repr(plan.burn_in)].out
    return _Run(plan.label, plan.config, plan.out, branch)


def _in_turn(
    runs: Sequence[_Run], problems: Mapping[TaskOptions, Problem], console: Console, quiet: bool
) -> None:
    width = max((len(run.label) for run in runs), default=0)
    for run in runs:
        over = run_directory.is_finished(run.out, run.config.rounds)
        past = run_directory.past(run.out, run.branch)
        with watched(
            console,
            f"{run.label:<{width}}",
            run.config.rounds,
            metric=task_named(run.config.task).metric,
            past=past,
            quiet=quiet or over,
        ) as progress:
            problem = problems[run.config.task_options]
            run_or_resume(
                run.config, run.out, callbacks=[progress], problem=problem, branch=run.branch
            )


def _side_by_side(runs: Sequence[_Run], jobs: int, console: Console, quiet: bool) -> None:
    """Each in a process of its own, which loads the task for itself."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context) as pool:
        waiting = {pool.submit(_alone, run): run for run in runs}
        try:
            for done in as_completed(waiting):
                done.result()
                if not quiet:
                    console.print(f"{waiting[done].label}: done", highlight=False)
        except BaseException:
            for future in waiting:
                future.cancel()
            raise


def _alone(run: _Run) -> None:
    with warnings.catch_warnings(), contextlib.suppress(BrokenPipeError):
        warnings.simplefilter("ignore")
        run_or_resume(run.config, run.out, branch=run.branch)
