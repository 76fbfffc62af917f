"""`fedpa run` and `fedpa resume`: train one method on one task, and resume it exactly."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import filesize
from rich.console import Console

from fedpa.engines.distributed import is_first, join
from fedpa.engines.options import Processes
from fedpa.experiments.cli.arguments import format_path, parse_words, say
from fedpa.experiments.cli.run_commands import handle_interrupts, load_problem
from fedpa.experiments.cli.training_commands import RunCommand, parse_run_command, refuse_unused
from fedpa.experiments.config import RunConfig, label_run, resolve, write_toml
from fedpa.experiments.estimate import estimate_run
from fedpa.experiments.privacy import make_budget
from fedpa.experiments.report.curves import compute_finals, read_curve, read_last
from fedpa.experiments.report.live import watch_run
from fedpa.experiments.run import check_run, read_resumed_config, run
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.metrics.streaming import PERCENTILES
from fedpa.privacy.accounting import compute_epsilon
from fedpa.training import run_directory
from fedpa.training.callbacks import max_minutes
from fedpa.training.checkpoint import list_checkpoints, read_last_checkpoint
from fedpa.training.loop import Fit
from fedpa.training.problem import Problem


@dataclasses.dataclass(frozen=True)
class ResumeCommand:
    """Resume a run from its last checkpoint. A finished run is not changed.

    The result equals that of an uninterrupted run, bit for bit.

    examples:
      fedpa resume runs/a               finish an interrupted run
      fedpa resume runs/a --rounds 300  extend a finished run to 300 rounds
    """

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """The run's directory."""
    rounds: int | None = None
    """Total number of rounds, at least those done; a larger number extends the run (default: as
    configured)."""
    max_minutes: float | None = None
    """Stop after this many minutes; fedpa resume continues the run (default: no limit)."""
    quiet: bool = False
    """Show no progress; print only the run's directory."""
    force: bool = False
    """Resume even if versions or data have changed; the result is then not exact."""
    processes: Processes = dataclasses.field(default_factory=Processes)


def start(argv: Sequence[str], console: Console) -> None:
    """`fedpa run`."""
    command, given = parse_run_command(RunCommand, argv, "fedpa run")
    join(command.processes)  # before anything else touches a device
    config = resolve(command.run)
    refuse_unused([command.run], [config], given)
    if command.out is not None and is_first():
        run_directory.check_free(command.out, command.overwrite, "--overwrite")
    # First, since the data may be missing or unsuitable.
    problem = load_problem(config)
    check_run(config, problem)
    if command.dry_run:
        _dry_run(config, problem, console)
    elif not is_first():
        run(config, None, problem=problem)  # works for the first process, which writes and prints
    else:
        out = command.out or run_directory.fresh_directory(f"{config.task}-{config.method}")
        result = _train(command, config, out, problem, console, overwrite=command.overwrite)
        _print_outcome(console, config, out, result, command.quiet)


def resume(argv: Sequence[str], console: Console) -> None:
    """`fedpa resume`."""
    command = parse_words(ResumeCommand, argv, "fedpa resume")
    join(command.processes)
    out = command.directory
    config = read_resumed_config(out, command.rounds)
    problem = load_problem(config)
    if not is_first():
        run(config, out, resuming=True, force=command.force, problem=problem)
        return
    over = run_directory.read_run(out).is_finished(config.rounds)
    stored = read_last_checkpoint(out)
    if not over and not command.quiet:
        after = f"after round {stored.round}" if stored else "from the start: no checkpoint"
        say(console, f"resuming {after}")
    how: dict[str, Any] = {"resuming": True, "force": command.force}
    past = stored.history if stored else ()
    result = _train(command, config, out, problem, console, past, over, **how)
    if over and not command.quiet:
        more = "--rounds N extends it"
        if result.stopped is not None:
            more = "it stopped early, so more rounds do not apply"
        say(console, f"already finished, nothing was changed: {more}")
    _print_outcome(console, config, out, result, command.quiet)


def _train(
    command: RunCommand | ResumeCommand,
    config: RunConfig,
    out: Path,
    problem: Problem,
    console: Console,
    past: Sequence[Mapping[str, Any]] = (),
    over: bool = False,
    **how: Any,
) -> Fit:
    """Call `how` with progress, a time limit, and signals that save the last round."""
    limit = [] if command.max_minutes is None else [max_minutes(command.max_minutes)]
    label = label_run(config)
    metric, quiet = task_named(config.task).metric, command.quiet or over

    def how_far() -> str:
        if not run_directory.is_run(out):
            return ""
        done = list_checkpoints(out)
        after = f"after round {done[-1]}" if done else "before the end of the first round"
        return f" {after}: {_explain_resuming(out)}"

    with (
        handle_interrupts(how_far, _explain_resuming(out)) as signals,
        watch_run(console, label, config.rounds, metric=metric, past=past, quiet=quiet) as progress,
    ):
        return run(config, out, callbacks=[signals, *limit, progress], problem=problem, **how)


def _explain_resuming(out: Path) -> str:
    return f"`fedpa resume {format_path(out)}` continues it"


def _print_outcome(
    console: Console, config: RunConfig, out: Path, result: Fit, quiet: bool = False
) -> None:
    """Print the result, why it ended, and its directory; `quiet`: only the directory."""
    if quiet:
        say(console, format_path(out))
        return
    rounds = len(result.history)
    for record in result.history:
        if "switch/round" in record:
            say(console, f"switched after round {record['switch/round']}")
    if result.stopped is not None:
        say(console, f"ended after round {rounds}: {result.stopped}")
    if not result.finished:
        say(console, f"{rounds} of {config.rounds} rounds done: {_explain_resuming(out)}")
        return
    metric, last = task_named(config.task).metric, preset_named(config.task, config.preset)[1].last
    (value,) = compute_finals([read_curve(result.history, f"eval/{metric}")], last)
    say(console, f"{metric} {value:.4f} (mean of the last {min(last, rounds)} rounds)")
    say(console, _format_test(result.history, metric))
    target = config.stopping.target
    if target is not None and result.stopped is None:
        say(console, f"the target {target:g} was not reached")
    best = (run_directory.read_summary(out) or {}).get("best")
    if best and best["round"] != rounds:
        say(
            console,
            f"best {best['metric']} {best['value']:.4f} in round {best['round']}: "
            f"`fedpa eval {format_path(out)} --params best` tests it",
        )
    say(console, f"written to {format_path(out)}")


def _format_test(history: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Format the final test result, overall and as percentiles over clients."""
    said = f"test {metric} {read_last(history, f'test/{metric}'):.4f}"
    lower, middle, upper = (read_last(history, f"test/{metric}_p{p}") for p in PERCENTILES)
    if middle == middle:
        said += f" (clients: 10 % at most {lower:.3f}, half {middle:.3f}, 90 % {upper:.3f})"
    return said


def _dry_run(config: RunConfig, problem: Problem, console: Console) -> None:
    console.print(write_toml(config), highlight=False, markup=False, end="")
    cost, seconds_per_round = estimate_run(config, problem)
    say(console, f"\n# {cost.clients:,} clients, {cost.parameters:,} parameters")
    for phase, seconds in seconds_per_round.items():
        memory = cost.phases[phase].client_memory or 0
        say(
            console,
            f"# {phase}: about {seconds:.3g} s per round "
            f"(measured on the client of median size, without compilation), "
            f"{filesize.decimal(memory)} per client in flight",
        )
    for line in str(cost).splitlines():
        say(console, f"# {line}")
    if config.privacy.clip is not None:
        say(console, f"# {describe_privacy(config, cost.clients)}")


def describe_privacy(config: RunConfig, clients: int) -> str:
    """Say what the rounds of a private run will have spent."""
    budget = make_budget(config.privacy)
    mechanism = budget.mechanism(clients, config.clients_per_round)
    spent = compute_epsilon(mechanism, config.rounds, budget.delta)
    ends = ""
    if budget.max_epsilon is not None and spent > budget.max_epsilon:
        ends = f"; the run ends before, at ε = {budget.max_epsilon:g}"
    return (
        f"privacy: ε = {spent:.4g} at δ = {budget.delta:g} after {config.rounds} rounds of "
        f"{mechanism.cohort} of {clients:,} clients ({mechanism.sampling}, "
        f"{mechanism.accountant}){ends}"
    )
