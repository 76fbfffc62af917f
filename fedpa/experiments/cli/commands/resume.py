"""`fedpa resume`: go on with a run, exactly."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from fedpa.engines.distributed import Processes, is_first, join
from fedpa.experiments.cli.arguments import parse_words
from fedpa.experiments.cli.run_commands import handle_interrupts_of, load_problem, print_outcome
from fedpa.experiments.methods import label_method
from fedpa.experiments.report.live import watch_run
from fedpa.experiments.run import resume, resumed_config
from fedpa.experiments.tasks.task import task_named
from fedpa.training import run_directory
from fedpa.training.checkpoint import read_last_checkpoint
from fedpa.training.stopping import max_minutes


@dataclasses.dataclass(frozen=True)
class ResumeCommand:
    """Go on with a run where its last checkpoint is: the result is that of an uninterrupted one.

    A finished run is left as it is.
    """

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """The run's directory."""
    rounds: int | None = None
    """How many rounds it shall have in all; more than it was to have extend it."""
    max_minutes: float | None = None
    """Stop after this many minutes, to be resumed later."""
    quiet: bool = False
    """Show no progress and print only the run's directory."""
    anyway: bool = False
    """Go on although versions or data are not what they were; the result is then not exact."""
    processes: Processes = dataclasses.field(default_factory=Processes)


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(ResumeCommand, argv, "fedpa resume")
    limit = [max_minutes(command.max_minutes)] if command.max_minutes is not None else []
    join(command.processes)
    out = command.directory
    config = resumed_config(out, command.rounds)
    problem = load_problem(config)
    if not is_first():
        resume(out, rounds=command.rounds, anyway=command.anyway, problem=problem)
        return
    metric = task_named(config.task).metric
    over = run_directory.read_run(out).is_finished(config.rounds)
    stored = read_last_checkpoint(out)
    if not over and not command.quiet:
        where = (
            f"after round {stored.round}" if stored else "from the start: there is no checkpoint"
        )
        console.print(f"going on {where}", highlight=False)
    with (
        handle_interrupts_of(out) as signals,
        watch_run(
            console,
            label_method(config.method, config.hyperparameters),
            config.rounds,
            metric=metric,
            past=stored.history if stored else (),
            quiet=command.quiet or over,
        ) as progress,
    ):
        result = resume(
            out,
            rounds=command.rounds,
            anyway=command.anyway,
            callbacks=[signals, *limit, progress],
            problem=problem,
        )
    if over and not command.quiet:
        more = "--rounds N gives it more rounds"
        if result.stopped is not None:
            more = "it was stopped, as one of more rounds would have been"
        console.print(f"finished already, nothing was changed: {more}", highlight=False)
    print_outcome(console, config, out, result, command.quiet)
