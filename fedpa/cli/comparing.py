"""The runs of a comparison, one after the other or several at a time."""

import contextlib
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedpa.cli.arguments import shown
from fedpa.errors import FedpaError
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
    waiting, alive = list(runs), dict[Any, tuple[Any, _Run, Connection]]()
    try:
        while waiting or alive:
            while waiting and len(alive) < jobs:
                run, (ours, theirs) = waiting.pop(0), context.Pipe(duplex=False)
                process = context.Process(target=_alone, args=(run, theirs))
                with _deaf():  # until it listens itself: imports have nothing to save
                    process.start()
                theirs.close()
                alive[process.sentinel] = (process, run, ours)
            for sentinel in wait(list(alive)):
                process, run, ours = alive.pop(sentinel)
                process.join()
                if process.exitcode != 0:
                    raise FedpaError(f"{run.label}: {_complaint(ours, process.exitcode)}")
                if not quiet:
                    console.print(f"{run.label}: done", highlight=False)
    finally:  # those that are left are to save what they have
        for process, _, _ in alive.values():
            while process.is_alive():
                os.kill(process.pid, signal.SIGINT)
                process.join(0.5)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C means nothing here; a process that is started here begins like that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _complaint(ours: Connection, code: int | None) -> str:
    try:
        return ours.recv() if ours.poll() else f"its process ended with code {code}"
    except EOFError:
        return f"its process ended with code {code}"


def _alone(run: _Run, tell: Connection) -> None:
    """One run, without a word; the first signal to end it is enough."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    warnings.simplefilter("ignore")
    try:
        run_or_resume(run.config, run.out, branch=run.branch)
    except KeyboardInterrupt:
        sys.exit(130)
    except FedpaError as error:
        tell.send(str(error))
        sys.exit(2)
