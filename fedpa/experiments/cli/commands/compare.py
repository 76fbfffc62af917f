"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import contextlib
import dataclasses
import shlex
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from rich import box
from rich.console import Console
from rich.table import Table

from fedpa.atomic_write import write_atomically
from fedpa.errors import FedpaError, check_integer, find_name, match_name, refuse
from fedpa.experiments.cli.arguments import format_path, say, write_words
from fedpa.experiments.cli.run_commands import (
    configure_run,
    handle_interrupts,
    load_problem,
    parse_run_command,
    refuse_unused,
)
from fedpa.experiments.comparison import (
    TUNING,
    Comparison,
    PlannedRun,
    Tuned,
    carry_out,
    check_runs,
    check_searches,
    check_validation,
    plan_searches,
    read_multiples,
    tune_rates,
)
from fedpa.experiments.config import RunConfig, is_all_burn_in, resolve, table_of
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.methods import METHODS, drop_others, label_method
from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.curves import Scale
from fedpa.experiments.report.figures import draw_curves, render_figure
from fedpa.experiments.report.live import watch_run
from fedpa.experiments.report.page import make_page
from fedpa.experiments.report.runs import find_runs, group_runs
from fedpa.experiments.report.tables import PUBLISHED, format_csv, format_number, make_table
from fedpa.experiments.run import check_run
from fedpa.experiments.sweeps.search import Trial, find_best
from fedpa.experiments.sweeps.space import describe_point, format_value
from fedpa.experiments.sweeps.sweep import SWEEP, Sweep
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import default_jobs
from fedpa.metrics.metric import lower_is_better
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback

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
    first = command.run.seed
    configs = {
        (config.method, seed): resolve(dataclasses.replace(config, seed=seed))
        for config in asked
        for seed in range(first, first + command.seeds)
    }
    refuse_unused(asked, [configs[name, first] for name in names], given)
    searches = _plan_searches(command, asked)
    reference = _reference(command.reference, names)
    if command.published and command.run.task not in PUBLISHED:
        raise refuse("published", True, f"the paper has no results for task {command.run.task}")
    problem = load_problem(configs[names[0], first])
    check_run(configs[names[0], first], problem)
    if searches:
        check_validation(command.run.task, problem)
    _warn_of_no_sampling([configs[name, first] for name in names])
    out = _directory(command)
    jobs = command.jobs or default_jobs(problem)
    comparison = Comparison(out, configs, _labels(configs), problem, jobs)
    if searches:
        check_searches(comparison, searches)
    else:
        check_runs(comparison)
    _remember(out, given)
    _run(comparison, searches, command.quiet, console)
    runs = [comparison.place(*key) for key in configs]
    _report(command, runs, reference, comparison.labels, out, console)


def _run(
    comparison: Comparison, searches: Mapping[str, Sweep], quiet: bool, console: Console
) -> None:
    """Choose rates, if there are searches for them, and train."""
    resuming = f"`fedpa compare --out {shlex.quote(format_path(comparison.out))}` continues it"

    def how_far() -> str:
        places = [comparison.place(*key) for key in comparison.configs]
        done = sum(run_directory.read_summary(place) is not None for place in places)
        return f", {done} of {len(places)} runs are finished: {resuming}"

    def begin(name: str, trial: Trial, again: bool) -> list[Callback]:
        if not quiet:
            say(console, f"choosing {name}'s rate: {describe_point(trial.params)}")
        return [look]

    @contextlib.contextmanager
    def show(planned: PlannedRun, width: int) -> Iterator[list[Callback]]:
        out, rounds = planned.out, planned.config.rounds
        over = run_directory.is_run(out) and run_directory.read_run(out).is_finished(rounds)
        with watch_run(
            console,
            f"{planned.label:<{width}}",
            rounds,
            metric=task_named(planned.config.task).metric,
            past=run_directory.past(out, planned.branch),
            quiet=quiet or over,
        ) as progress:
            yield [progress, look]

    def tell(planned: PlannedRun) -> None:
        if not quiet:
            say(console, f"{planned.label}: done")

    with handle_interrupts(how_far, resuming) as look:
        if searches:
            comparison, tuned = tune_rates(comparison, searches, begin)
            console.print(_make_choices_table(tuned, comparison.labels))
            check_runs(comparison)
        carry_out(comparison, show, tell)


def _make_choices_table(choices: Mapping[str, Tuned], labels: Mapping[str, str]) -> Table:
    """The grid, as a person reads it."""
    metric = next(iter(choices.values())).metric
    sign = -1 if lower_is_better(metric) else 1
    view = Table(
        title=f"rates, by {metric}",
        title_justify="left",
        caption="* chosen; ! at the end of what was tried",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    view.add_column("method", no_wrap=True)
    view.add_column("of", no_wrap=True)
    view.add_column("rate: value")
    for name, choice in choices.items():
        top, ends = find_best(choice.trials), (choice.trials[0], choice.trials[-1])
        cells = []
        for trial in choice.trials:
            mark = "" if trial is not top else ("*!" if trial in ends else "*")
            value = "–" if trial.value is None else format_number(sign * trial.value, ".4f")
            cells.append(f"{format_value(trial.params[choice.rate])}:\u00a0{value}{mark}")
        view.add_row(labels[name], choice.rate.split("_")[0], "  ".join(cells))
    return view


def _warn_of_no_sampling(configs: Sequence[RunConfig]) -> None:
    """Say it before the first run starts, not when their turn comes."""
    names = ", ".join(config.method for config in configs if is_all_burn_in(config))
    if names:
        warnings.warn(
            f"all {configs[0].rounds} rounds of {names} are burn-in: nothing is sampled, and this "
            "is FedAvg; lower --burn-in-rounds or raise --rounds",
            stacklevel=2,
        )


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


def _plan_searches(command: CompareCommand, asked: Sequence[RunConfig]) -> dict[str, Sweep]:
    if command.tune is None:
        for name in ("tune_rounds", "tune_by"):
            if getattr(command, name) is not None:
                raise refuse(name, getattr(command, name), "needs --tune")
        return {}
    if command.tune_rounds is not None:
        check_integer("tune_rounds", command.tune_rounds, 1)
    return plan_searches(asked, read_multiples(command.tune), command.tune_rounds, command.tune_by)


def _configure(name: str, given: Mapping[str, Any], among: Sequence[str]) -> RunConfig:
    """The run of one method; what only others of the comparison take is theirs."""
    config = configure_run(given, name)
    if given.get("tune") is not None and config.task_options.eval_split == "auto":
        # Curves on the test split: rates are chosen on validation.
        config = replace_fields(config, eval_split="test")
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
    published = PUBLISHED.get(command.run.task, ()) if command.published else ()
    # Printed first: whatever becomes of the files, the numbers are seen.
    console.print(make_table(comparison, published, name))
    with run_directory.writing(out):
        write_atomically(out / run_directory.TABLE, format_csv(comparison).encode())
        curves = render_figure(draw_curves([comparison]), "png")
        write_atomically(out / run_directory.CURVES, curves)
        write_atomically(out / run_directory.REPORT, make_page([comparison]).encode())
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
