"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import dataclasses
import shlex
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, check_integer, find_name, match_name, refuse
from fedpa.experiments.cli.arguments import format_path, say, write_words
from fedpa.experiments.cli.comparison import (
    TUNING,
    Planned,
    carry_out,
    check_places,
    check_planned,
    check_validation,
    make_choices_table,
    plan_searches,
    read_multiples,
    tune_rates,
    use_best,
)
from fedpa.experiments.cli.run_commands import (
    configure_run,
    load_problem,
    parse_run_command,
    refuse_unused,
)
from fedpa.experiments.config import RunConfig, resolve, table_of
from fedpa.experiments.methods import METHODS, drop_others, label_method
from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.figures import draw_curves, render_figure
from fedpa.experiments.report.found_runs import Scale, find_runs, group_runs
from fedpa.experiments.report.page import page
from fedpa.experiments.report.tables import PUBLISHED, format_csv, make_table
from fedpa.experiments.run import check_run
from fedpa.experiments.shared_burn_in import find_shared_burn_in, is_all_burn_in
from fedpa.experiments.sweeps.sweep import SWEEP, Sweep
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import default_jobs
from fedpa.training import run_directory

PROG = "fedpa compare"
ELSEWHERE = {"out", "jobs", "quiet", "overwrite"}
"""Fields that say nothing of what is compared."""


@dataclasses.dataclass(frozen=True)
class CompareCommand:
    """Run several methods on one task and compare them."""

    run: RunConfig = dataclasses.field(metadata={"without": ("method",)})
    methods: str | None = None
    """Comma-separated methods; the task's choice if not given."""
    seeds: int = 1
    """How many seeds each method runs: --seed, --seed + 1, …"""
    reference: str | None = None
    """The method that differences are taken from; fedavg if it takes part, else the first."""
    tune: str | None = None
    """Multiples of each method's server rate (of its client rate where the server's is fixed), as
    0.3,1,3: each method runs at the one that is best on validation, by a seed of its own."""
    tune_rounds: int | None = None
    """Rounds of the runs that choose it, if not as many as are compared."""
    tune_by: str | None = None
    """What decides: loss, where the task's own metric (accuracy, say, which is what decides if
    nothing is said) tells little apart in so few rounds."""
    published: bool = False
    """Show the paper's own results beside the measured ones."""
    jobs: int | None = None
    """Runs at a time, in processes of their own; if not given, 1 for models whose programs use all
    cores, half of the cores for small ones."""
    out: Path | None = None
    """Directory to write to; a fresh runs/<time>-<task>-compare if not given. If the
    directory contains a comparison, it is continued: finished runs are kept, interrupted runs
    resumed, missing runs started."""
    config: Path | None = None
    """A config.toml to start from; options on the command line win over it."""
    overwrite: bool = False
    """Replace what the directory already holds."""
    quiet: bool = False
    """Show no progress, only the table."""


def main(argv: Sequence[str], console: Console) -> None:
    command, given = parse_run_command(CompareCommand, argv, PROG)
    if "out" in given and set(given) <= ELSEWHERE:
        words = [*_read_words(given["out"]), *argv]
        command, given = parse_run_command(CompareCommand, words, PROG)
    check_integer("seeds", command.seeds, 1)
    if command.jobs is not None:
        check_integer("jobs", command.jobs, 1)
    task = task_named(command.run.task)
    # Everything is checked before the first run starts.
    names = _names(command.methods, task.compared)
    asked = [_configure(name, given, names) for name in names]
    if command.tune is not None:
        asked = [_on_test(config) for config in asked]
    configs = {
        (config.method, seed): resolve(dataclasses.replace(config, seed=seed))
        for config in asked
        for seed in range(command.run.seed, command.run.seed + command.seeds)
    }
    refuse_unused(asked, [configs[name, command.run.seed] for name in names], given)
    sweeps = _sweeps(command, asked)
    reference = _reference(command.reference, names)
    if command.published and command.run.task not in PUBLISHED:
        raise refuse("published", True, f"the paper has no results for task {command.run.task}")
    problems = {options: load_problem(config) for options, config in _by_options(configs).items()}
    for config in configs.values():
        check_run(config, problems[config.task_options])
    if sweeps:
        check_validation(command.run.task, problems)
    _warn_of_no_sampling([configs[name, command.run.seed] for name in names])
    out = _directory(command)
    labels = _labels(configs)
    jobs = command.jobs or min(default_jobs(problem) for problem in problems.values())
    if sweeps:
        check_places(sweeps, out)
        _remember(out, given)
        going_on = f"`fedpa compare --out {shlex.quote(format_path(out))}` goes on"
        choices = tune_rates(sweeps, out, problems, jobs, console, command.quiet, going_on)
        console.print(make_choices_table(choices, labels))
        configs = {
            (name, seed): resolve(use_best(config, choices[name]))
            for (name, seed), config in configs.items()
        }
    planned = _planned(configs, labels, command.seeds, out)
    check_planned(planned, out, problems)
    _remember(out, given)
    carry_out(planned, out, problems, jobs, console, command.quiet)
    _report(command, [plan.out for plan in planned], reference, labels, out, console)


def _warn_of_no_sampling(configs: Sequence[RunConfig]) -> None:
    """Say it before the first run starts, not when their turn comes."""
    names = ", ".join(config.method for config in configs if is_all_burn_in(config))
    if names:
        warnings.warn(
            f"all {configs[0].rounds} rounds of {names} are burn-in: nothing is sampled, and this "
            "is FedAvg; lower --burn-in-rounds or raise --rounds",
            stacklevel=2,
        )


def _planned(
    configs: Mapping[tuple[str, int], RunConfig], labels: Mapping[str, str], seeds: int, out: Path
) -> list[Planned]:
    first_rounds = find_shared_burn_in(configs)
    return [
        Planned(
            labels[name] if seeds == 1 else f"{labels[name]}, seed {seed}",
            config,
            out / f"{name}-{seed}",
            first_rounds.get((name, seed)),
        )
        for (name, seed), config in configs.items()
    ]


def _remember(out: Path, given: Mapping[str, Any]) -> None:
    """Write the words with which the comparison is resumed."""
    fields = {field: value for field, value in given.items() if field not in ELSEWHERE}
    content = tomli_w.dumps({"words": write_words(CompareCommand, fields)})
    with run_directory.writing(out):
        write_atomically(out / run_directory.COMPARISON, content.encode())


def _read_words(out: Path) -> list[str]:
    """The words of the comparison in a directory."""
    path = out / run_directory.COMPARISON
    if not path.is_file():
        raise refuse("out", str(out), "contains no comparison to resume; name a task")
    words = table_of("out", path).get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise FedpaError(f"{path} is not of a comparison: words is missing or wrong")
    return words


def _on_test(config: RunConfig) -> RunConfig:
    """Curves on the test split, unless told otherwise: rates are chosen on validation."""
    options = config.task_options
    if options.eval_split != "auto":
        return config
    options = dataclasses.replace(options, eval_split="test")
    return dataclasses.replace(config, task_options=options)


def _sweeps(command: CompareCommand, given: Sequence[RunConfig]) -> dict[str, Sweep]:
    if command.tune is None:
        for name in ("tune_rounds", "tune_by"):
            if getattr(command, name) is not None:
                raise refuse(name, getattr(command, name), "needs --tune")
        return {}
    if command.tune_rounds is not None:
        check_integer("tune_rounds", command.tune_rounds, 1)
    return plan_searches(given, read_multiples(command.tune), command.tune_rounds, command.tune_by)


def _configure(name: str, given: Mapping[str, Any], among: Sequence[str]) -> RunConfig:
    """The run of one method; what only others of the comparison take is theirs."""
    config = configure_run(given, name)
    own = drop_others(name, config.hyperparameters, among)
    return dataclasses.replace(config, hyperparameters=own)


def _report(
    command: CompareCommand,
    runs: Sequence[Path],
    reference: str | None,
    labels: Mapping[str, str],
    out: Path,
    console: Console,
) -> None:
    """Read the runs once; table, curves and page are made of that."""
    task = task_named(command.run.task)
    name, preset = preset_named(command.run.task, command.run.preset)
    groups = [
        group._replace(label=labels[group.runs[0].settings["method"]])
        for group in group_runs(find_runs(runs))
    ]
    scale = Scale(task.metric, preset.targets, preset.last)
    (comparison,) = compare_groups(groups, reference, scale)
    seeds = "1 seed" if command.seeds == 1 else f"{command.seeds} seeds"
    title = f"{command.run.task}, {command.run.rounds} rounds, {seeds}"
    published = PUBLISHED.get(command.run.task, ()) if command.published else ()
    # Printed first: whatever becomes of the files, the numbers are seen.
    console.print(make_table(comparison, title, published, name))
    with run_directory.writing(out):
        write_atomically(out / run_directory.TABLE, format_csv(comparison).encode())
        curves = render_figure(draw_curves(comparison, title), "png")
        write_atomically(out / run_directory.CURVES, curves)
        write_atomically(out / run_directory.REPORT, page([comparison]).encode())
    say(
        console,
        f"written to {format_path(out)}: {run_directory.TABLE}, {run_directory.CURVES}, "
        f"{run_directory.REPORT}, one directory per run",
    )
    say(console, f"to look at in a browser: {(out / run_directory.REPORT).resolve().as_uri()}")


def _directory(command: CompareCommand) -> Path:
    if command.out is None:
        return run_directory.fresh_directory(f"{command.run.task}-compare")
    if command.overwrite:
        run_directory.check_free(command.out, overwrite=True)
        run_directory.clear(command.out)
        if any((command.out / TUNING).glob(f"*/{SWEEP}")):
            shutil.rmtree(command.out / TUNING)
    else:
        run_directory.check_comparison(command.out)
    with run_directory.writing(command.out):
        command.out.mkdir(parents=True, exist_ok=True)
    return command.out


def _reference(wanted: str | None, names: Sequence[str]) -> str | None:
    """The method that the others are compared with; None if there is only one."""
    found = None if wanted is None else match_name(wanted, names)
    if wanted is not None and found is None:
        raise refuse("reference", wanted, f"does not take part; choose from {', '.join(names)}")
    if len(names) == 1:
        return None
    return found or ("fedavg" if "fedavg" in names else names[0])


def _by_options(configs: dict[tuple[str, int], RunConfig]) -> dict[TaskOptions, RunConfig]:
    """One of the configurations for each way to load the task."""
    return {config.task_options: config for config in configs.values()}


def _labels(configs: dict[tuple[str, int], RunConfig]) -> dict[str, str]:
    """method → its label, FedPA[5]; with the method's name where two would read the same."""
    labels = {name: label_method(name, c.hyperparameters) for (name, _), c in configs.items()}
    alike = {label for label in labels.values() if list(labels.values()).count(label) > 1}
    return {name: f"{x} ({name})" if x in alike else x for name, x in labels.items()}


def _names(text: str | None, default: tuple[str, ...]) -> list[str]:
    if text is None:
        return list(default)
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise refuse("methods", text, f"name at least one of {', '.join(METHODS)}")
    names = [find_name("method", word, METHODS) for word in words]
    if len(set(names)) < len(names):
        raise FedpaError(f"methods = {text!r}: each method may be named once")
    return names
