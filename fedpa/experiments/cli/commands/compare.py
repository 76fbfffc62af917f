"""`fedpa compare`: several methods on one task, the same cohorts for all, a table and curves."""

import dataclasses
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedpa.algorithms.plateau import Plateau
from fedpa.errors import FedpaError, check_integer, find_name, match_name, refuse, suggest
from fedpa.experiments.cli.arguments import format_path, say, write_words
from fedpa.experiments.cli.run_commands import handle_interrupts, load_problem
from fedpa.experiments.cli.training_commands import (
    CompareCommand,
    configure_run,
    parse_run_command,
    refuse_unused,
)
from fedpa.experiments.comparison.comparison import (
    Choice,
    Plan,
    Planned,
    carry_out,
    check_plan,
    describe_first_rounds,
    remember,
    run_in_turn,
)
from fedpa.experiments.comparison.display import make_choices_table, show_runs, write_report
from fedpa.experiments.comparison.tasks import (
    Tuning,
    check_validation,
    choose_deciding,
    find_burn_in_end,
    make_entry,
    plan_search,
    read_multiples,
    run_side_by_side,
)
from fedpa.experiments.config import (
    RunConfig,
    is_all_burn_in,
    label_run,
    resolve,
    table_of,
)
from fedpa.experiments.hyperparameters import replace_fields
from fedpa.experiments.methods import METHODS, drop_others
from fedpa.experiments.report.comparison import compare_groups
from fedpa.experiments.report.conclusions import conclude, join_words
from fedpa.experiments.report.curves import Scale
from fedpa.experiments.report.live import LINES
from fedpa.experiments.report.runs import find_runs, group_runs
from fedpa.experiments.report.tables import PUBLISHED, make_table
from fedpa.experiments.run import check_run
from fedpa.experiments.tasks.task import preset_named, task_named
from fedpa.experiments.workers import default_jobs
from fedpa.training import run_directory

PROG = "fedpa compare"
ELSEWHERE = {"out", "jobs", "quiet", "overwrite"}
"""Fields that do not affect the results."""
LINES_OF_ALL = 40
"""About how many lines of progress a comparison prints without a terminal, at most 10 per run."""


def main(argv: Sequence[str], console: Console) -> None:
    command, given = parse_run_command(CompareCommand, argv, PROG)
    if "out" in given and set(given) <= ELSEWHERE:
        words = [*_read_words(given["out"]), *argv]
        command, given = parse_run_command(CompareCommand, words, PROG)
    if command.jobs is not None:
        check_integer("jobs", command.jobs, 1)
    task = task_named(command.run.task)
    # Everything is checked before the first run starts.
    names = _names(command.methods, task.compared)
    asked = [_configure(name, given, names) for name in names]
    number = command.seeds
    if number is None:
        number = preset_named(command.run.task, command.run.preset)[1].seeds
    check_integer("seeds", number, 1)
    seeds = range(command.run.seed, command.run.seed + number)
    # The last seed may be out of range.
    configs = [resolve(dataclasses.replace(own, seed=seed)) for own in asked for seed in seeds]
    configs = configs[:: len(seeds)]
    refuse_unused(asked, configs, given)
    tuning = _read_tuning(command)
    searches = {} if tuning is None else {own.method: plan_search(own, tuning) for own in asked}
    reference = _reference(command.reference, names)
    if command.published and command.run.task not in PUBLISHED:
        raise refuse("published", True, f"the paper has no results for task {command.run.task}")
    deciding = None
    if tuning is not None:
        deciding = choose_deciding(command.run.task, command.run.preset, tuning)
    problem = load_problem(configs[0])
    check_run(configs[0], problem)
    if tuning is not None:
        check_validation(command.run.task, problem)
    _warn_of_no_sampling(configs)
    labels = _labels(configs)
    entries = [
        make_entry(own, labels[own.method], problem, searches.get(own.method)) for own in asked
    ]
    plan = Plan(_directory(command), entries, seeds, deciding, PROG)
    check_plan(plan)
    fields = {field: value for field, value in given.items() if field not in ELSEWHERE}
    remember(plan, write_words(CompareCommand, fields))
    if not command.quiet:
        _introduce(configs, labels, task.summary, seeds, console)
    _run(plan, task.metric, command.jobs or default_jobs(problem), command.quiet, console)
    _report(command, plan, reference, labels, console)


def _run(plan: Plan, metric: str, jobs: int, quiet: bool, console: Console) -> None:
    """Tune rates if asked to, and train."""
    resuming = f"`fedpa compare --out {shlex.quote(format_path(plan.out))}` continues it"
    labels = {entry.name: entry.label for entry in plan.entries}

    def how_far() -> str:
        places = plan.list_places()
        done = sum(run_directory.read_summary(place) is not None for place in places)
        return f", {done} of {len(places)} runs are finished: {resuming}"

    def tell(planned: Planned) -> None:
        if not quiet:
            say(console, f"{planned.label}: done")

    def show_choices(chosen: Mapping[str, Choice]) -> None:
        console.print(make_choices_table({labels[name]: own for name, own in chosen.items()}))

    with handle_interrupts(how_far, resuming) as look:
        lines = max(LINES_OF_ALL // len(plan.list_places()), 1)
        show = show_runs(console, metric, quiet, [look], min(lines, LINES))

        def carry(stage: Sequence[Planned]) -> None:
            if jobs > 1 and len(stage) > 1:
                run_side_by_side(stage, jobs, tell)
            else:
                run_in_turn(stage, show)

        carry_out(plan, carry, show_choices)


def _introduce(
    configs: Sequence[RunConfig],
    labels: Mapping[str, str],
    summary: str,
    seeds: range,
    console: Console,
) -> None:
    """Say what is compared, before the first run starts."""
    first = configs[0]
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    say(console, f"{first.task}: {summary}")
    rounds = f"{first.rounds} rounds of {first.clients_per_round} clients"
    say(console, f"{rounds}, {which}; [M]: a client's local epochs per round")
    width = max(map(len, labels.values()))
    starting: dict[int | Plateau, list[str]] = {}
    for config in configs:
        label, end = labels[config.method], find_burn_in_end(config)
        say(console, f"  {label:<{width}}  {METHODS[config.method].summary}")
        if end is not None:
            starting.setdefault(end, []).append(label)
    for end, among in starting.items():
        which = describe_first_rounds(end)
        say(console, f"the {which} of {join_words(among)} are FedAvg's (burn-in)")


def _warn_of_no_sampling(configs: Sequence[RunConfig]) -> None:
    """Warn before the first run starts, not when the method's turn comes."""
    names = ", ".join(config.method for config in configs if is_all_burn_in(config))
    if names:
        warnings.warn(
            f"all {configs[0].rounds} rounds of {names} are burn-in, which is FedAvg: nothing is "
            "sampled. Lower --burn-in-rounds or raise --rounds",
            stacklevel=2,
        )


def _read_words(out: Path) -> list[str]:
    """Read the arguments of the comparison in a directory."""
    path = out / run_directory.COMPARISON
    if not path.is_file():
        raise refuse("out", str(out), "contains no comparison to resume; name a task")
    table = table_of("out", path)
    if table.get("made_by", PROG) != PROG:
        raise refuse("out", str(out), f"was made by {table['made_by']}: the same call continues it")
    words = table.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise FedpaError(f"{path} is not of a comparison: words is missing or wrong")
    return words


def _read_tuning(command: CompareCommand) -> Tuning | None:
    if command.tune is None:
        for name in ("tune_rounds", "tune_by"):
            if getattr(command, name) is not None:
                raise refuse(name, getattr(command, name), "needs --tune")
        return None
    if command.tune_rounds is not None:
        check_integer("tune_rounds", command.tune_rounds, 1)
    return Tuning(read_multiples(command.tune), command.tune_rounds, command.tune_by)


def _configure(name: str, given: Mapping[str, Any], among: Sequence[str]) -> RunConfig:
    """Configure the run of one method, without settings that only other methods take."""
    config = configure_run(given, name)
    if given.get("tune") is not None and config.task_options.eval_split == "auto":
        # Curves show the test split, since rates are chosen on validation clients.
        config = replace_fields(config, eval_split="test")
    own = drop_others(name, config.hyperparameters, among)
    return dataclasses.replace(config, hyperparameters=own)


def _report(
    command: CompareCommand,
    plan: Plan,
    reference: str | None,
    labels: Mapping[str, str],
    console: Console,
) -> None:
    """Read the runs, and write table, curves and page."""
    task = task_named(command.run.task)
    name, preset = preset_named(command.run.task, command.run.preset)
    groups = [
        group._replace(label=labels[group.runs[0].settings["method"]])
        for group in group_runs(find_runs(plan.list_places()))
    ]
    scale = Scale(task.metric, preset.targets, preset.last)
    (comparison,) = compare_groups(groups, reference, scale)
    published = PUBLISHED.get(command.run.task, ()) if command.published else ()
    # Printed first, in case writing the files fails.
    console.print(make_table(comparison, published, name))
    write_report(plan.out, comparison)
    say(
        console,
        f"written to {format_path(plan.out)}: {run_directory.TABLE}, {run_directory.LATEX}, "
        f"{run_directory.CURVES}, {run_directory.REPORT}, one directory per run",
    )
    page = plan.out / run_directory.REPORT
    say(console, f"open in a browser: {page.resolve().as_uri()}")
    for sentence in conclude(comparison):
        console.print(sentence, markup=False, highlight=False)


def _directory(command: CompareCommand) -> Path:
    if command.out is None:
        return run_directory.fresh_directory(f"{command.run.task}-compare")
    if command.overwrite:
        run_directory.check_free(command.out, overwrite=True)
        run_directory.clear(command.out)
    else:
        run_directory.check_comparison(command.out)
    with run_directory.writing(command.out):
        command.out.mkdir(parents=True, exist_ok=True)
    return command.out


def _reference(wanted: str | None, names: Sequence[str]) -> str | None:
    """Choose the method that the others are compared with; None if there is only one."""
    found = None if wanted is None else match_name(wanted, names)
    if wanted is not None and found is None:
        raise refuse("reference", wanted, f"does not take part; {suggest(wanted, names)}")
    if len(names) == 1:
        return None
    return found or ("fedavg" if "fedavg" in names else names[0])


def _labels(configs: Sequence[RunConfig]) -> dict[str, str]:
    """Label methods, as FedPA[5]; with the method's name if two labels would be equal."""
    labels = {config.method: label_run(config) for config in configs}
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
        raise FedpaError(f"methods = {text!r}: names a method twice. Name each once")
    return names
