"""The runs of a comparison, one after the other or several at a time."""

import concurrent.futures
import hashlib
import itertools
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fedpa.errors import FedpaError
from fedpa.experiments.cli.arguments import shown
from fedpa.experiments.cli.resumable import interruptible
from fedpa.experiments.config import RunConfig
from fedpa.experiments.report.live import watched
from fedpa.experiments.run import check_goes_on, run_or_resume
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import Problem, task_named
from fedpa.experiments.workers import workers
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.history import History
from fedpa.training.run_directory import is_run, read_run, wait_for_lock


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
    stages = _stages(planned, out)
    going_on = f"`fedpa compare --out {shlex.quote(shown(out))}` goes on"

    def how_far() -> str:
        done = sum(run_directory.read_summary(plan.out) is not None for plan in planned)
        return f", {done} of {len(planned)} runs are finished: {going_on}"

    with interruptible(how_far, going_on) as look:
        for stage in stages:
            if jobs > 1 and len(stage) > 1:
                _side_by_side(stage, jobs, console, quiet)
            else:
                _in_turn(stage, problems, console, quiet, look)
    return [run_directory.read_metrics(plan.out) for plan in planned]


def check_planned(
    planned: Sequence[Planned], out: Path, problems: Mapping[TaskOptions, Problem]
) -> None:
    """Refuse runs of other settings that lie there, before anything is written."""
    for run in itertools.chain(*_stages(planned, out)):
        check_goes_on(run.config, run.out, problems[run.config.task_options])


def _stages(planned: Sequence[Planned], out: Path) -> "tuple[list[_Run], list[_Run]]":
    first = _burn_ins(planned, out)
    return list(first.values()), [_after(plan, first) for plan in planned]


class _Run(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    branch: Path | None


def _burn_ins(planned: Sequence[Planned], out: Path) -> dict[str, _Run]:
    """The runs that make the first rounds of several others that have not begun yet."""
    found: dict[str, _Run] = {}
    for plan in planned:
        begun = bool(list_checkpoints(plan.out))
        if plan.burn_in is not None and not begun and repr(plan.burn_in) not in found:
            # By its settings: other methods, or another burn-in, leave it as it is.
            digest = hashlib.sha256(repr(plan.burn_in).encode()).hexdigest()[:8]
            place = out / run_directory.BURN_IN / f"{plan.burn_in.seed}-{digest}"
            label = f"first {plan.burn_in.rounds} rounds, seed {plan.burn_in.seed}"
            found[repr(plan.burn_in)] = _Run(label, plan.burn_in, place, None)
    return found


def _after(plan: Planned, first: Mapping[str, _Run]) -> _Run:
    made = first.get(repr(plan.burn_in))
    branch = None if made is None else made.out
    return _Run(plan.label, plan.config, plan.out, branch)


def _in_turn(
    runs: Sequence[_Run],
    problems: Mapping[TaskOptions, Problem],
    console: Console,
    quiet: bool,
    look: Callback,
) -> None:
    width = max((len(run.label) for run in runs), default=0)
    for run in runs:
        over = is_run(run.out) and read_run(run.out).is_finished(run.config.rounds)
        past = run_directory.past(run.out, run.branch)
        with watched(
            console,
            f"{run.label:<{width}}",
            run.config.rounds,
            metric=task_named(run.config.task).metric,
            past=past,
            quiet=quiet or over,
        ) as progress:
            _perform(run, problems[run.config.task_options], [progress, look])


def _side_by_side(runs: Sequence[_Run], jobs: int, console: Console, quiet: bool) -> None:
    """So many at a time, in processes that load the task for themselves."""
    with workers(jobs) as submit:
        pending = {submit(_alone, run, run.config): run for run in runs}
        for future in concurrent.futures.as_completed(pending):
            run = pending[future]
            try:
                ended = future.result()
            except FedpaError as error:
                raise FedpaError(f"{run.label}: {error}") from None
            if not ended:
                raise KeyboardInterrupt
            if not quiet:
                console.print(f"{run.label}: done", highlight=False)


def _alone(run: _Run, problem: Problem, look: Callback) -> bool:
    return _perform(run, problem, [look])


def _perform(run: _Run, problem: Problem, callbacks: Sequence[Callback]) -> bool:
    """Whether it came to its end."""
    wait_for_lock(run.out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all .* rounds are burn-in")  # said for all runs at once
        fit = run_or_resume(
            run.config, run.out, callbacks=callbacks, problem=problem, branch=run.branch
        )
    return fit.finished
