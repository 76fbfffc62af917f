"""`fedpa run`: train one method on one task."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from fedpa.algorithms.method import labelled
from fedpa.cli.arguments import parse, refuse_unused_sampler, shown
from fedpa.cli.loading import loaded
from fedpa.engines.distributed import Processes, is_first, join
from fedpa.metrics.streaming import PERCENTILES
from fedpa.report.live import watched
from fedpa.report.summary import at_the_end, curve, final
from fedpa.tasks.task import Problem, preset_named, task_named
from fedpa.training import run_directory
from fedpa.training.config import RunConfig, resolve, write_toml
from fedpa.training.estimate import estimate
from fedpa.training.run import run

SUMMARY = "train one method on one task"


@dataclasses.dataclass(frozen=True)
class RunCommand:
    """Train one method on one task."""

    run: Annotated[RunConfig, tyro.conf.OmitArgPrefixes]
    out: Path | None = None
    """Directory to write to; a fresh runs/<time>-<task>-<method> if not given."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    overwrite: bool = False
    """Replace a run that the directory already holds."""
    dry_run: bool = False
    """Print the resolved configuration and what a round will cost, and stop."""
    processes: Annotated[Processes, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Processes
    )


def main(argv: Sequence[str], console: Console) -> None:
    command = parse(RunCommand, argv, "fedpa run")
    join(command.processes)  # before anything else touches a device
    config = resolve(command.run)
    refuse_unused_sampler([config.method], argv)
    if command.out is not None:
        run_directory.check_free(command.out, command.overwrite)
    problem = loaded(config)  # before anything is made: the data may not be there
    if command.dry_run:
        _dry_run(config, problem, console)
        return
    if not is_first():
        run(config, None, problem=problem)  # works for the first process, which writes and tells
        return
    out = command.out or run_directory.fresh_directory(f"{config.task}-{config.method}")
    label = labelled(config.method, config.hyperparameters)
    with watched(console, label, config.rounds, metric=task_named(config.task).metric) as progress:
        result = run(
            config, out, overwrite=command.overwrite, callbacks=[progress], problem=problem
        )
    task, last = task_named(config.task), preset_named(config.task, config.preset)[1].last
    value = final(curve(result.history, f"eval/{task.metric}"), last)
    console.print(f"{task.metric} {value:.4f} (mean of the last {min(last, config.rounds)} rounds)")
    console.print(_tested(result.history, task.metric), highlight=False)
    console.print(f"written to {shown(out)}", soft_wrap=True, markup=False, highlight=False)


def _tested(history: Sequence[Mapping[str, Any]], metric: str) -> str:
    """The model at the end on the whole test split, and who is left behind."""
    said = f"test {metric} {at_the_end(history, f'test/{metric}'):.4f}"
    lower, middle, upper = (at_the_end(history, f"test/{metric}_p{p}") for p in PERCENTILES)
    if middle == middle:
        said += f" (clients: 10 % at most {lower:.3f}, half {middle:.3f}, 90 % {upper:.3f})"
    return said


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
