"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedpa.algorithms.method import labelled, methods, without_others
from fedpa.cli.arguments import parse, refuse_unused_sampler, shown
from fedpa.cli.comparing import Planned, carried_out
from fedpa.cli.loading import loaded
from fedpa.cores import cores
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.report.curves import draw_curves
from fedpa.report.found_runs import find_runs, grouped
from fedpa.report.page import page
from fedpa.report.parts import parts
from fedpa.report.published import PUBLISHED
from fedpa.report.table import Histories, as_csv, printed, rows
from fedpa.tasks.options import TaskOptions
from fedpa.tasks.task import preset_named, task_named
from fedpa.training import run_directory
from fedpa.training.config import RunConfig, resolve
from fedpa.training.run import check_run
from fedpa.training.shared_burn_in import shared
from fedpa.training.whole_files import write_atomically

SUMMARY = "run several methods on one task and compare them"


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Run several methods on one task and compare them."""

    run: Annotated[RunConfig, tyro.conf.OmitArgPrefixes]
    methods: str | None = None
    """Comma-separated methods; the task's choice if not given."""
    seeds: int = 1
    """How many seeds each method runs: --seed, --seed + 1, …"""
    reference: str | None = None
    """The method that differences are taken from; fedavg if it takes part, else the first."""
    published: bool = False
    """Show the paper's own results beside the measured ones."""
    jobs: int | None = None
    """Runs at a time, each in a process of its own; half the number of cores if not given."""
    out: Path | None = None
    """Directory to write to; a fresh runs/<time>-<task>-compare if not given. A comparison that
    lies there is gone on with: what is finished is kept, what was cut resumed, what is missing
    run."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    overwrite: bool = False
    """Replace what the directory already holds."""
    quiet: bool = False
    """Show no progress, only the table."""


def main(argv: Sequence[str], console: Console) -> None:
    if any(word.split("=")[0] == "--method" for word in argv):
        raise FedpaError("unknown option --method: did you mean --methods? (several, with commas)")
    command = parse(CompareCommand, argv, "fedpa compare")
    check_integer("seeds", command.seeds, 1)
    jobs = max(cores() // 2, 1) if command.jobs is None else command.jobs
    check_integer("jobs", jobs, 1)
    task = task_named(command.run.task)
    # Everything is checked before the first run starts.
    names = _names(command.methods, task.compared)
    configs = {
        (name, seed): resolve(dataclasses.replace(config, seed=seed))
        for name in names
        for config in [_of_method(name, argv, names)]
        for seed in range(command.run.seed, command.run.seed + command.seeds)
    }
    reference = _reference(command.reference, names)
    if command.published and command.run.task not in PUBLISHED:
        raise refuse("published", True, f"the paper has no results for task {command.run.task}")
    problems = {options: loaded(config) for options, config in _by_options(configs).items()}
    for config in configs.values():
        check_run(config, problems[config.task_options])
    refuse_unused_sampler(names, argv)
    out = _directory(command)

    labels = _labels(configs)
    first_rounds = shared(configs)
    planned = [
        Planned(
            labels[name] if command.seeds == 1 else f"{labels[name]}, seed {seed}",
            config,
            out / f"{name}-{seed}",
            first_rounds.get((name, seed)),
        )
        for (name, seed), config in configs.items()
    ]
    found = carried_out(planned, out, problems, jobs, console, command.quiet)
    histories: dict[str, list[list[dict[str, object]]]] = {}
    for (name, _), history in zip(configs, found, strict=True):
        histories.setdefault(labels[name], []).append(list(history))
    against = labels[reference] if reference is not None else None
    places = [plan.out for plan in planned]  # in the table's order: colours are the same
    _report(command, histories, against, places, out, console)


def _of_method(name: str, argv: Sequence[str], among: Sequence[str]) -> RunConfig:
    """The run of one method; what only others of the comparison take is theirs."""
    config = parse(CompareCommand, argv, "fedpa compare", method=name).run
    own = without_others(name, config.hyperparameters, among)
    return dataclasses.replace(config, hyperparameters=own)


def _report(
    command: CompareCommand,
    histories: Histories,
    reference: str | None,
    places: Sequence[Path],
    out: Path,
    console: Console,
) -> None:
    task = task_named(command.run.task)
    _, preset = preset_named(command.run.task, command.run.preset)
    table = rows(histories, task.metric, preset.targets, preset.last, reference)
    write_atomically(out / run_directory.TABLE, as_csv(table, task.metric).encode())
    rounds = command.run.rounds
    seeds = "1 seed" if command.seeds == 1 else f"{command.seeds} seeds"
    title = f"{command.run.task}, {rounds} rounds, {seeds}"
    draw_curves(histories, task.metric, preset.targets, title, out / run_directory.CURVES)
    published = PUBLISHED.get(command.run.task, ()) if command.published else ()
    last = min(preset.last, rounds)
    console.print(printed(table, title, task.metric, last, reference, published))
    found = parts(grouped(find_runs(places)))
    write_atomically(out / run_directory.REPORT, page(found).encode())
    for text in (
        f"written to {shown(out)}: {run_directory.TABLE}, {run_directory.CURVES}, "
        f"{run_directory.REPORT}, one directory per run",
        f"to look at in a browser: {(out / run_directory.REPORT).resolve().as_uri()}",
    ):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _directory(command: CompareCommand) -> Path:
    if command.out is None:
        return run_directory.fresh_directory(f"{command.run.task}-compare")
    if command.overwrite:
        run_directory.check_free(command.out, overwrite=True)
        run_directory.clear(command.out)
    elif run_directory.is_run(command.out):
        raise refuse("out", str(command.out), "holds a run: choose another directory")
    else:
        run_directory.check_writable(command.out)
    with run_directory.writing(command.out):
        command.out.mkdir(parents=True, exist_ok=True)
    return command.out


def _reference(wanted: str | None, names: Sequence[str]) -> str | None:
    """The method that the others are compared with; None if there is only one."""
    if wanted is not None and wanted not in names:
        raise refuse("reference", wanted, f"does not take part; choose from {', '.join(names)}")
    if len(names) == 1:
        return None
    return wanted or ("fedavg" if "fedavg" in names else names[0])


def _by_options(configs: dict[tuple[str, int], RunConfig]) -> dict[TaskOptions, RunConfig]:
    """One of the configurations for each way to load the task."""
    return {config.task_options: config for config in configs.values()}


def _labels(configs: dict[tuple[str, int], RunConfig]) -> dict[str, str]:
    """method → its label, FedPA[5]; with the method's name where two would read the same."""
    labels = {name: labelled(name, c.hyperparameters) for (name, _), c in configs.items()}
    alike = {label for label in labels.values() if list(labels.values()).count(label) > 1}
    return {name: f"{x} ({name})" if x in alike else x for name, x in labels.items()}


def _names(text: str | None, default: tuple[str, ...]) -> list[str]:
    if text is None:
        return list(default)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise refuse("methods", text, f"name at least one of {', '.join(methods())}")
    for name in names:
        if name not in methods():
            raise refuse("method", name, f"unknown method; choose from {', '.join(methods())}")
    if len(set(names)) < len(names):
        raise FedpaError(f"methods = {text!r}: each method may be named once")
    return names
