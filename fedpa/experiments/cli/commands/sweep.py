"""`fedpa sweep`: search for a method's hyperparameters on a task."""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.experiments.cli.arguments import format_path, say
from fedpa.experiments.cli.run_commands import (
    configure_run,
    handle_interrupts,
    load_problem,
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
from fedpa.experiments.tasks.task import Grid, preset_named, task_named
from fedpa.experiments.workers import default_jobs
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Event
from fedpa.training.problem import Problem
from fedpa.training.run_directory import TRIALS

RESUMING = {"out", "jobs", "trials", "quiet", "anyway"}
"""Fields with which a sweep is resumed."""


@dataclasses.dataclass(frozen=True)
class SweepCommand:
    """Search for a method's hyperparameters on a task; chosen on validation clients.

    The same words again go on with a sweep that was interrupted; so does `fedpa sweep --out DIR`.
    """

    run: RunConfig
    space: Path | None = None
    """A TOML file with the values to try, in a table [space]; the task's grid if not given."""
    search: str = "grid"
    """How they are tried: grid (all), random, or tpe (learns from the trials before)."""
    trials: int | None = None
    """How many; all of a grid, 20 else."""
    search_seed: int = 0
    """Seed of random and tpe; all trials have the run's own --seed."""
    prune: bool = False
    """Give up a trial that is below the median of the others at the same round."""
    jobs: int | None = None
    """Trials at a time, in processes; if not given, 1 for models whose programs use all cores, half
    of the cores for small ones."""
    paper: bool = False
    """As the paper did: rates and epochs on FedAvg, then burn-in rounds and rho on FedPA."""
    out: Path | None = None
    """Directory to write to, or to go on in; a fresh runs/<time>-<task>-sweep if not given."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    anyway: bool = False
    """Go on with trials that were cut although versions or data are not what they were."""
    quiet: bool = False
    """Show no progress and print only the sweep's directory."""


def main(argv: Sequence[str], console: Console) -> None:
    command, given = parse_run_command(SweepCommand, argv, "fedpa sweep")
    check_own(command.run.method, command.run.hyperparameters)
    if command.jobs is not None:
        check_integer("jobs", command.jobs, 1)
    remarks: list[str] = []
    stages = None
    if "out" in given and set(given) <= RESUMING:
        stages, settings = _found(command)
    elif command.paper:
        stages = _stages(command, given, remarks)
        settings = stages.training
    else:
        settings = _settings(command, given, remarks)
    if command.out is not None:
        check_place(command.out, stages or settings)
    problem = load_problem(settings.base)
    _check_runs([settings] if stages is None else list(stages), problem)
    remarks += _on_test(settings.base, problem)
    out = command.out or run_directory.fresh_directory(f"{settings.base.task}-sweep")
    if not command.quiet:
        for remark in remarks:
            say(console, remark)

    jobs = command.jobs or default_jobs(problem)
    going_on = f"`fedpa sweep --out {shlex.quote(format_path(out))}` goes on"

    def perform(settings: Sweep, place: Path) -> list[Trial]:
        if not command.quiet:
            method = settings.base.method
            many = f"{settings.search.trials} trials of {method}"
            say(console, f"{many} ({settings.search.kind}) over {', '.join(settings.space)}")
            if "rho" in settings.space and settings.base.hyperparameters.epochs == 1:
                say(console, "with 1 epoch there is one sample, and rho changes nothing")
        with _watching(console, settings, problem, command.quiet, jobs) as watch:
            watch = watch._replace(begin=_also(watch, look))
            found = sweep(settings, place, problem, jobs=jobs, watch=watch, anyway=command.anyway)
        _report(console, settings, place, problem, found, command.quiet)
        return found

    with handle_interrupts(lambda: f": {going_on}", going_on) as look:
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


def _settings(command: SweepCommand, given: Mapping[str, Any], remarks: list[str]) -> Sweep:
    base = command.run
    if command.space is not None:
        space = read_space(command.space)
        _refuse_fixed(space, given)
    else:
        grid = _find_grid(base)
        whole = grid.sampling if METHODS[base.method].samples else grid.training
        space = _trimmed(whole, base, given, remarks)
    search = choose_search(
        command.search, space, command.trials, command.search_seed, command.prune
    )
    settings = check_sweep(Sweep(base, space, search))
    refuse_unused([base], [configure(base, first_point(settings.space))], given)
    return settings


def _found(command: SweepCommand) -> tuple[Stages | None, Sweep]:
    """The sweep, or the stages, that lie in a directory; perhaps with more trials."""
    out = command.out
    assert out is not None
    settings = read_settings(out)
    if isinstance(settings, Stages):
        if command.trials is not None:
            raise refuse("trials", command.trials, "a sweep in stages keeps the number it has")
        return settings, settings.training
    if command.trials is not None:
        kind, _, seed, prune = settings.search
        search = choose_search(kind, settings.space, command.trials, seed, prune)
        settings = settings._replace(search=search)
    return None, check_sweep(settings)


def _stages(command: SweepCommand, given: Mapping[str, Any], remarks: list[str]) -> Stages:
    if command.run.method != "fedpa":
        raise refuse(
            "method", command.run.method, "--paper chooses fedavg's, then fedpa's: leave it"
        )
    fedavg = configure_run(given, "fedavg")
    if command.space is not None:
        space = read_space(command.space)
        _refuse_fixed(space, given)
        first, second = split_space(space)
    else:
        grid = _find_grid(command.run)
        first = _trimmed(grid.training, fedavg, given, remarks)
        second = _trimmed(grid.sampling, command.run, given, remarks)

    def stage(base: RunConfig, space: Space) -> Sweep:
        trials, points = command.trials, size(space)
        if trials is not None and command.search == "random" and (points or trials) < trials:
            remarks.append(f"{base.method} has {points} points to try: all of them are")
            trials = points
        search = choose_search(command.search, space, trials, command.search_seed, command.prune)
        return check_sweep(Sweep(base, space, search))

    return Stages(stage(fedavg, first), stage(command.run, second))


def _find_grid(base: RunConfig) -> Grid:
    grid = preset_named(base.task, base.preset)[1].grid
    if grid is None:
        raise refuse("task", base.task, "has no grid of its own: give --space FILE")
    return grid


def _trimmed(grid: Space, base: RunConfig, given: Mapping[str, Any], remarks: list[str]) -> Space:
    """The task's grid without what the command line fixes, and what the runs can't have."""
    wanted = {name: values for name, values in grid.items() if name not in given}
    space = trim_space(wanted, base)
    for name, values in wanted.items():
        kept: Any = space.get(name, ())
        left_out = [str(value) for value in values if value not in kept]
        if left_out:
            remarks.append(
                f"left out of the grid: {name} {', '.join(left_out)}, which {base.method} can't "
                f"have in {base.rounds} rounds"
            )
    if not space:
        raise FedpaError(
            f"nothing is left to choose of task {base.task}'s grid, {', '.join(grid)}: fix less on "
            "the command line, give more --rounds, or --space FILE"
        )
    return space


def _refuse_fixed(space: Space, given: Mapping[str, Any]) -> None:
    for name in space:
        if name in given:
            raise refuse(name, given[name], "is in the space, too: leave it out of one of them")


def _check_runs(sweeps: Sequence[Sweep], problem: Problem) -> None:
    for settings in sweeps:
        check_run(configure(settings.base, first_point(settings.space)), problem)


def _on_test(base: RunConfig, problem: Problem) -> list[str]:
    """A choice made on the test split makes its numbers look better than they are."""
    if problem.validation is not None:
        return []
    takes = "validation_share" in task_named(base.task).takes
    hint = "; --validation-share 0.1 holds some clients out for it" if takes else ""
    return [f"there are no validation clients: this chooses on the test split{hint}"]


def _also(watch: Watch, callback: Callback) -> Any:
    return lambda trial, again: [callback, *watch.begin(trial, again)]


@contextlib.contextmanager
def _watching(
    console: Console, settings: Sweep, problem: Problem, quiet: bool, jobs: int
) -> Iterator[Watch]:
    """A line for each trial that has ended; on a terminal, below them, the present one's rounds."""
    if quiet:
        yield Watch()
        return
    total = settings.search.trials
    metric = find_metric(settings.base.task, problem, settings.by)
    width = len(str(total))
    live = console.is_terminal and console.is_interactive
    status = console.status("", spinner="dots") if live else None

    def named(trial: Trial) -> str:
        place = f"({trial.number + 1:>{width}} of {total})"
        return f"trial {trial.number:>{width}} {place}  {describe_point(trial.params)}"

    def begin(trial: Trial, again: bool) -> Sequence[Callback]:
        if again:
            say(console, f"{named(trial)}: was interrupted, goes on")
        if status is None:
            return ()
        status.update(f"{named(trial)}{f' and {jobs - 1} more' if jobs > 1 else ''}")

        def show(event: Event) -> None:
            value = event.record.get(metric)
            last = "" if value is None else f"  {metric} {value:.4f}"
            status.update(f"{named(trial)}  round {event.round}/{event.rounds}{last}")

        return [show]

    def end(trial: Trial, all: Sequence[Trial]) -> None:
        say(console, f"{named(trial)}  {_outcome(trial, find_best(all))}")

    with status or contextlib.nullcontext():
        yield Watch(begin, end)


def _outcome(trial: Trial, top: Trial | None) -> str:
    if trial.state == "pruned":
        return f"given up after round {trial.about.get('rounds')}"
    if trial.value is None:
        return f"has no value: {trial.about.get('stopped', 'its metric is not a number')}"
    return f"{trial.value:.4f}" + (" *" if top is not None and top.number == trial.number else "")


def _report(
    console: Console,
    settings: Sweep,
    out: Path,
    problem: Problem,
    trials: Sequence[Trial],
    quiet: bool,
) -> None:
    base = settings.base
    metric = goal(find_metric(base.task, problem, settings.by))
    title = f"{base.task}, {base.method}, {base.rounds} rounds, {len(trials)} trials"
    picture = draw_sensitivity(settings.space, trials, metric, title)
    with run_directory.writing(out):
        write_atomically(out / PICTURE, render_figure(picture, "png"))
    if quiet:
        return
    top = find_best(trials)
    if top is None:
        say(console, "no trial has a value: there is no best")
        return
    console.print(sensitivity_table(settings.space, trials, metric))
    last = min(preset_named(base.task, base.preset)[1].last, base.rounds)
    say(console, f"best: trial {top.number}, {describe_point(top.params)}")
    say(console, f"{metric} {top.value:.4f} (mean of the last {last} rounds)")
