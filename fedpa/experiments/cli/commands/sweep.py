"""`fedpa sweep`: search for a method's hyperparameters on a task."""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.experiments.cli.arguments import format_path, say
from fedpa.experiments.cli.run_commands import handle_interrupts, load_problem
from fedpa.experiments.cli.training_commands import (
    SweepCommand,
    configure_run,
    parse_run_command,
    refuse_unused,
)
from fedpa.experiments.config import RunConfig
from fedpa.experiments.methods import METHODS, check_own
from fedpa.experiments.report.figures import render_figure
from fedpa.experiments.run import check_run
from fedpa.experiments.sweeps.search import Trial, choose_search, find_best
from fedpa.experiments.sweeps.sensitivity import PICTURE, draw_sensitivity, sensitivity_table
from fedpa.experiments.sweeps.space import (
    Space,
    configure,
    describe_point,
    first_point,
    read_space,
    size,
    trim_space,
)
from fedpa.experiments.sweeps.sweep import (
    BEST,
    STAGE_DIRECTORIES,
    TABLE,
    Stages,
    Sweep,
    Watch,
    check_place,
    check_sweep,
    find_metric,
    goal,
    read_settings,
    run_stages,
    split_space,
    sweep,
)
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import default_jobs
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Event
from fedpa.training.problem import Problem
from fedpa.training.run_directory import TRIALS

RESUMING = {"out", "jobs", "trials", "quiet", "force"}
"""Fields that may be given when a sweep is resumed."""


def main(argv: Sequence[str], console: Console) -> None:
    command, given = parse_run_command(SweepCommand, argv, "fedpa sweep")
    check_own(command.run.method, command.run.hyperparameters)
    if command.jobs is not None:
        check_integer("jobs", command.jobs, 1)
    remarks: list[str] = []
    stages = None
    if "out" in given and set(given) <= RESUMING:
        stages, settings = _read_sweep(command.out or Path(), command.trials)
    elif command.paper:
        if command.run.method != "fedpa":
            raise refuse(
                "method", command.run.method, "--paper uses fedavg, then fedpa: leave it out"
            )
        bases = (configure_run(given, "fedavg"), command.run)
        stages = Stages(*(_plan_sweep(command, base, given, remarks) for base in bases))
        settings = stages.training
    else:
        settings = _plan_sweep(command, command.run, given, remarks)
        first = configure(settings.base, first_point(settings.space))
        refuse_unused([command.run], [first], given)
    if command.out is not None:
        check_place(command.out, stages or settings)
    problem = load_problem(settings.base)
    check_run(configure(settings.base, first_point(settings.space)), problem)
    if problem.validation is None:
        remarks.append("there are no validation clients: settings are chosen on the test split")
        if "validation_share" in task_named(settings.base.task).takes:
            remarks[-1] += "; --validation-share 0.1 holds out validation clients"
    out = command.out or run_directory.fresh_directory(f"{settings.base.task}-sweep")
    jobs = command.jobs or default_jobs(problem)
    resuming = f"`fedpa sweep --out {shlex.quote(format_path(out))}` continues it"
    talks = Console(quiet=True) if command.quiet else console
    for remark in remarks:
        say(talks, remark)

    def perform(settings: Sweep, place: Path) -> list[Trial]:
        many = f"{settings.search.trials} trials of {settings.base.method}"
        say(talks, f"{many} ({settings.search.kind}) over {', '.join(settings.space)}")
        if "rho" in settings.space and settings.base.hyperparameters.epochs == 1:
            say(talks, "with 1 epoch there is one sample, and rho has no effect")
        with _watch(talks, settings, problem, jobs, look) as watch:
            trials = sweep(settings, place, problem, jobs=jobs, watch=watch, force=command.force)
        _report(talks, settings, place, problem, trials)
        return trials

    with handle_interrupts(lambda: f": {resuming}", resuming) as look:
        if stages is None:
            perform(settings, out)
        else:
            run_stages(stages, out, perform)
    if command.quiet:
        say(console, format_path(out))
        return
    files = f"{BEST}, {TABLE}, {PICTURE}, {TRIALS}/"
    below = (
        f" (in {' and '.join(STAGE_DIRECTORIES)}; {BEST} of the second)"
        if stages is not None
        else ""
    )
    say(console, f"written to {format_path(out)}: {files}{below}")
    say(console, f"`fedpa run --config {format_path(out / BEST)}` runs the best again")


def _plan_sweep(
    command: SweepCommand, base: RunConfig, given: Mapping[str, Any], remarks: list[str]
) -> Sweep:
    """Make the sweep of the method of `base`, or of a stage of `--paper`."""
    samples = METHODS[base.method].samples
    if command.space is not None:
        space = read_space(command.space)
        for name in space:
            if name in given:
                raise refuse(name, given[name], "is also in the space: leave it out of one of them")
        if command.paper:
            training, sampling = split_space(space)
            space = sampling if samples else training
    else:
        grid = preset_named(base.task, base.preset)[1].grid
        if grid is None:
            raise refuse("task", base.task, "has no grid: give --space FILE")
        space = _trim_grid(grid.sampling if samples else grid.training, base, given, remarks)
    trials, points = command.trials, size(space)
    if (
        command.paper
        and command.search == "random"
        and points is not None
        and points < (trials or 0)
    ):
        remarks.append(f"{base.method} has only {points} points: all are tried")
        trials = points
    search = choose_search(command.search, space, trials, command.search_seed, command.prune)
    return check_sweep(Sweep(base, space, search))


def _read_sweep(out: Path, trials: int | None) -> tuple[Stages | None, Sweep]:
    """Read the sweep in a directory, or its stages and the first of them; with `trials` trials."""
    settings = read_settings(out)
    if isinstance(settings, Stages):
        if trials is not None:
            raise refuse("trials", trials, "cannot change in a sweep with stages")
        return settings, settings.training
    if trials is not None:
        kind, _, seed, prune = settings.search
        search = choose_search(kind, settings.space, trials, seed, prune)
        settings = settings._replace(search=search)
    return None, check_sweep(settings)


def _trim_grid(grid: Space, base: RunConfig, given: Mapping[str, Any], remarks: list[str]) -> Space:
    """Read the task's grid, without settings of the command line and values that can't run."""
    wanted = {name: values for name, values in grid.items() if name not in given}
    space = trim_space(wanted, base)
    for name, values in wanted.items():
        kept: Any = space.get(name, ())
        left_out = [str(value) for value in values if value not in kept]
        if left_out:
            remarks.append(
                f"left out of the grid: {name} {', '.join(left_out)}, which {base.method} can't "
                f"use in {base.rounds} rounds"
            )
    if not space:
        raise FedpaError(
            f"nothing is left to sweep in task {base.task}'s grid, {', '.join(grid)}: fix fewer "
            "settings, give more --rounds, or --space FILE"
        )
    return space


@contextlib.contextmanager
def _watch(
    console: Console, settings: Sweep, problem: Problem, jobs: int, look: Callback
) -> Iterator[Watch]:
    """Print a line for each trial that ended; on a terminal, also the current trial's rounds."""
    total = settings.search.trials
    metric = find_metric(settings.base.task, problem)
    width = len(str(total))
    live = console.is_terminal and console.is_interactive and not console.quiet
    status = console.status("", spinner="dots") if live else None

    def name_trial(trial: Trial) -> str:
        place = f"({trial.number + 1:>{width}} of {total})"
        return f"trial {trial.number:>{width}} {place}  {describe_point(trial.params)}"

    def begin(trial: Trial, again: bool) -> Sequence[Callback]:
        if again:
            say(console, f"{name_trial(trial)}: was interrupted, resumed")
        if status is None:
            return [look]
        status.update(f"{name_trial(trial)}{f' and {jobs - 1} more' if jobs > 1 else ''}")

        def show(event: Event) -> None:
            value = event.record.get(metric)
            last = "" if value is None else f"  {metric} {value:.4f}"
            status.update(f"{name_trial(trial)}  round {event.round}/{event.rounds}{last}")

        return [look, show]

    def end(trial: Trial, all: Sequence[Trial]) -> None:
        say(console, f"{name_trial(trial)}  {_outcome(trial, find_best(all))}")

    with status or contextlib.nullcontext():
        yield Watch(begin, end)


def _outcome(trial: Trial, top: Trial | None) -> str:
    if trial.state == "pruned":
        return f"pruned after round {trial.about.get('rounds')}"
    if trial.value is None:
        return f"no value: {trial.about.get('stopped', 'its metric is not a number')}"
    return f"{trial.value:.4f}" + (" *" if top is not None and top.number == trial.number else "")


def _report(
    console: Console,
    settings: Sweep,
    out: Path,
    problem: Problem,
    trials: Sequence[Trial],
) -> None:
    base = settings.base
    metric = goal(find_metric(base.task, problem))
    title = f"{base.task}, {base.method}, {base.rounds} rounds, {len(trials)} trials"
    picture = draw_sensitivity(settings.space, trials, metric, base.method, title)
    with run_directory.writing(out):
        write_atomically(out / PICTURE, render_figure(picture, "png"))
    top = find_best(trials)
    if top is None:
        say(console, "no trial has a value, so there is no best")
        return
    console.print(sensitivity_table(settings.space, trials, metric))
    last = min(preset_named(base.task, base.preset)[1].last, base.rounds)
    say(console, f"best: trial {top.number}, {describe_point(top.params)}")
    say(console, f"{metric} {top.value:.4f} (mean of the last {last} rounds)")
