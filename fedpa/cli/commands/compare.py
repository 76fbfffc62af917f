"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedpa.algorithms.method import methods
from fedpa.cli.arguments import parse, shown
from fedpa.errors import FedpaError, refuse
from fedpa.report.curves import draw_curves
from fedpa.report.progress import watched
from fedpa.report.table import as_csv, printed, rows
from fedpa.tasks.task import task_named
from fedpa.training import run_directory
from fedpa.training.config import RunConfig, resolve
from fedpa.training.run import run

SUMMARY = "run several methods on one task and compare them"
TABLE, CURVES = "table.csv", "curves.png"


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
    command = parse(CompareCommand, argv, "fedpa compare")
    if command.seeds < 1:
        raise refuse("seeds", command.seeds, "must be at least 1")
    task = task_named(command.run.task)
    names = _names(command.methods, task.compared)
    # Everything is checked before the first run starts.
    configs = {
        name: resolve(parse(CompareCommand, argv, "fedpa compare", method=name).run)
        for name in names
    }
    out = command.out or run_directory.fresh_directory(f"{command.run.task}-compare")
    run_directory.check_free(out, command.overwrite, mark=TABLE)
    directories = {
        (name, seed): out / f"{name}-{seed}"
        for name in names
        for seed in range(command.run.seed, command.run.seed + command.seeds)
    }
    for directory in directories.values():
        run_directory.check_free(directory, command.overwrite)

    histories: dict[str, list[list[dict[str, object]]]] = {}
    for (name, seed), directory in directories.items():
        config = dataclasses.replace(configs[name], seed=seed)
        label = labelled(name, config.hyperparameters.epochs)
        shown_label = label if command.seeds == 1 else f"{label}, seed {seed}"
        with watched(console, f"{shown_label:<16}", config.rounds) as progress:
            result = run(config, directory, overwrite=command.overwrite, callbacks=[progress])
        histories.setdefault(label, []).append(result.history)

    table = rows(histories, task.metric, task.targets, task.last)
    run_directory.write_atomically(out / TABLE, as_csv(table, task.metric).encode())
    rounds = configs[names[0]].rounds
    seeds = "1 seed" if command.seeds == 1 else f"{command.seeds} seeds"
    title = f"{command.run.task}, {rounds} rounds, {seeds}"
    draw_curves(histories, task.metric, task.targets, title, out / CURVES)
    console.print(printed(table, title, task.metric, min(task.last, rounds)))
    console.print(
        f"written to {shown(out)}: {TABLE}, {CURVES}, one directory per run", soft_wrap=True
    )


def labelled(name: str, epochs: int) -> str:
    """The method's label with its number of epochs: FedPA[5]."""
    return methods()[name].label.replace("[M]", f"[{epochs}]")


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
