"""`fedpa run`: train one method on one task."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpa.engines.distributed import Processes, is_first, join
from fedpa.experiments.cli.run_commands import (
    handle_interrupts_of,
    load_problem,
    parse_run_command,
    print_outcome,
    refuse_unused,
)
from fedpa.experiments.config import RunConfig, resolve, write_toml
from fedpa.experiments.estimate import estimate
from fedpa.experiments.methods import label_method
from fedpa.experiments.report.live import watch_run
from fedpa.experiments.run import check_run, run
from fedpa.experiments.tasks.task import task_named
from fedpa.training import run_directory
from fedpa.training.problem import Problem
from fedpa.training.stopping import max_minutes


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Train one method on one task."""

    run: RunConfig
    out: Path | None = None
    """Directory to write to; a fresh runs/<time>-<task>-<method> if not given."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    overwrite: bool = False
    """Replace a run that the directory already holds."""
    dry_run: bool = False
    """Print the resolved configuration and what a round will cost, and stop."""
    max_minutes: float | None = None
    """Stop after this many minutes, to be resumed later."""
    quiet: bool = False
    """Show no progress and print only the run's directory."""
    processes: Processes = dataclasses.field(default_factory=Processes)


def main(argv: Sequence[str], console: Console) -> None:
    command, given = parse_run_command(RunCommand, argv, "fedpa run")
    limit = [max_minutes(command.max_minutes)] if command.max_minutes is not None else []
    join(command.processes)  # before anything else touches a device
    config = resolve(command.run)
    refuse_unused([command.run], [config], given)
    if command.out is not None and is_first():
        run_directory.check_free(command.out, command.overwrite)
    # Before anything is made: the data may not be there, or not have what is asked for.
    problem = load_problem(config)
    check_run(config, problem)
    if command.dry_run:
        _dry_run(config, problem, console)
        return
    if not is_first():
        run(config, None, problem=problem)  # works for the first process, which writes and tells
        return
    out = command.out or run_directory.fresh_directory(f"{config.task}-{config.method}")
    label = label_method(config.method, config.hyperparameters)
    metric = task_named(config.task).metric
    with (
        handle_interrupts_of(out) as signals,
        watch_run(console, label, config.rounds, metric=metric, quiet=command.quiet) as progress,
    ):
        result = run(
            config,
            out,
            overwrite=command.overwrite,
            callbacks=[signals, *limit, progress],
            problem=problem,
        )
    print_outcome(console, config, out, result, command.quiet)


def _dry_run(config: RunConfig, problem: Problem, console: Console) -> None:
    console.print(write_toml(config), highlight=False, markup=False, end="")
    cost = estimate(config, problem)
    console.print(f"\n# {cost.clients:,} clients, {cost.parameters:,} parameters", highlight=False)
    for phase, seconds in cost.seconds_per_round.items():
        console.print(
            f"# {phase}: about {seconds:.3g} s per round "
            f"(measured on the client of median size, without compilation), "
            f"{cost.memory[phase] / 2**20:.3g} MiB per client in flight",
            highlight=False,
            soft_wrap=True,
        )
