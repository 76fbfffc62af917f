"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedpa.algorithms.method import labelled, methods
from fedpa.cli.arguments import parse, refuse_unused_sampler, shown
from fedpa.cli.loading import loaded
from fedpa.errors import FedpaError, refuse
from fedpa.report.curves import draw_curves
from fedpa.report.live import watched
from fedpa.report.table import as_csv, printed, rows
from fedpa.tasks.options import TaskOptions
from fedpa.tasks.task import preset_named, task_named
from fedpa.training import run_directory
from fedpa.training.config import RunConfig, resolve
from fedpa.training.run import check_run, run
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
    out: Path | None = None
    """Directory to write to; a fresh runs/<time>-<task>-compare if not given."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    overwrite: bool = False
    """Replace what the directory already holds."""


def main(argv: Sequence[str], console: Console) -> None:
    if any(word.split("=")[0] == "--method" for word in argv):
        raise FedpaError("unknown option --method: did you mean --methods? (several, with commas)")
    command = parse(CompareCommand, argv, "fedpa compare")
    if command.seeds < 1:
        raise refuse("seeds", command.seeds, "must be at least 1")
    task = task_named(command.run.task)
    _, preset = preset_named(command.run.task, command.run.preset)
    # Everything is checked before the first run starts.
    configs = {
        (name, seed): resolve(dataclasses.replace(config, seed=seed))
        for name in _names(command.methods, task.compared)
        for config in [parse(CompareCommand, argv, "fedpa compare", method=name).run]
        for seed in range(command.run.seed, command.run.seed + command.seeds)
    }
    problems = {options: loaded(config) for options, config in _by_options(configs).items()}
    for config in configs.values():
        check_run(config, problems[config.task_options])
    refuse_unused_sampler(list(dict.fromkeys(name for name, _ in configs)), argv)
    if command.out is not None:
        run_directory.check_free(command.out, command.overwrite)
        run_directory.clear(command.out)
    out = command.out or run_directory.fresh_directory(f"{command.run.task}-compare")

    labels = _labels(configs)
    width = max(map(len, labels.values())) + (0 if command.seeds == 1 else len(", seed 0"))
    histories: dict[str, list[list[dict[str, object]]]] = {}
    for (name, seed), config in configs.items():
        shown_label = labels[name] if command.seeds == 1 else f"{labels[name]}, seed {seed}"
        with watched(
            console, f"{shown_label:<{width}}", config.rounds, metric=task.metric
        ) as progress:
            problem = problems[config.task_options]
            result = run(config, out / f"{name}-{seed}", callbacks=[progress], problem=problem)
        histories.setdefault(labels[name], []).append(result.history)

    table = rows(histories, task.metric, preset.targets, preset.last)
    write_atomically(out / run_directory.TABLE, as_csv(table, task.metric).encode())
    rounds = command.run.rounds
    seeds = "1 seed" if command.seeds == 1 else f"{command.seeds} seeds"
    title = f"{command.run.task}, {rounds} rounds, {seeds}"
    draw_curves(histories, task.metric, preset.targets, title, out / run_directory.CURVES)
    console.print(printed(table, title, task.metric, min(preset.last, rounds)))
    console.print(
        f"written to {shown(out)}: {run_directory.TABLE}, {run_directory.CURVES}, "
        "one directory per run",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


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
