"""The runs of a comparison: each method's rate chosen, if asked for, then all runs carried out.

Rates are chosen on validation from multiples of each method's own. The same multiples for each, of
the server's rate, or of the client's where the method fixes the server's. Where the best is at an
end of what was tried, the next one beyond it is tried, too, up to `MOST_BEYOND` times: no method
should lose by where its grid ended. Where none gives a number, lower ones are tried. Rates are
chosen with a seed that the comparison does not have.
"""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from fedpa.errors import FedpaError, refuse
from fedpa.experiments.cli.arguments import format_path
from fedpa.experiments.cli.run_commands import handle_interrupts
from fedpa.experiments.config import RunConfig, resolve
from fedpa.experiments.report.live import watch_run
from fedpa.experiments.report.tables import format_number
from fedpa.experiments.run import check_resumable, run
from fedpa.experiments.shared_burn_in import is_all_burn_in
from fedpa.experiments.sweeps.search import Trial, choose_search, find_best
from fedpa.experiments.sweeps.space import format_value
from fedpa.experiments.sweeps.sweep import (
    Sweep,
    Watch,
    check_place,
    check_sweep,
    find_metric,
    sweep,
)
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import task_named
from fedpa.experiments.workers import workers
from fedpa.metrics.metric import lower_is_better
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback
from fedpa.training.checkpoint import list_checkpoints
from fedpa.training.problem import Problem
from fedpa.training.run_directory import is_run, read_run, wait_for_lock

TUNING = "tuning"
"""Where the sweeps are, one for each method."""
RATES = ("server_learning_rate", "client_learning_rate")
SEED = 1_000_000
"""Added to the comparison's first seed."""
MOST_BEYOND = 3


class Tuned(NamedTuple):
    method: str
    rate: str
    """Which of `RATES`."""
    trials: Sequence[Trial]
    """By rate."""
    metric: str
    """By which they were chosen: valid/accuracy."""


def read_multiples(text: str) -> tuple[float, ...]:
    """`0.3,1,3` as numbers."""
    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise refuse("tune", text, "must be numbers with commas, as 0.3,1,3") from None
    if len(found) < 2 or len(set(found)) < len(found) or not all(0 < x < 1e9 for x in found):
        raise refuse("tune", text, "must be at least two different multiples > 0, as 0.3,1,3")
    return tuple(sorted(found))


def plan_searches(
    given: Sequence[RunConfig],
    multiples: Sequence[float],
    rounds: int | None,
    by: str | None = None,
) -> dict[str, Sweep]:
    """For each method the sweep that chooses its rate; refuses what can't be run."""
    known = {task_named(config.task).metric for config in given} | {"loss"}
    if by is not None and by not in known:
        raise refuse("tune_by", by, f"choose from {', '.join(sorted(known))}")
    by = "loss" if by == "loss" else None  # the task's own is what decides anyway
    return {config.method: _search(config, multiples, rounds, by) for config in given}


def _search(
    config: RunConfig, multiples: Sequence[float], rounds: int | None, by: str | None
) -> Sweep:
    own = resolve(config).hyperparameters
    rate = next((name for name in RATES if _is_free(config, name)), None)
    if rate is None:
        raise refuse("tune", config.method, f"method {config.method} has no rate to choose")
    # Three digits are enough for a rate, and 0.30000000000000004 is none.
    values = tuple(float(f"{getattr(own, rate) * multiple:.3g}") for multiple in multiples)
    # What is chosen on validation does not see the test split, which takes a while to see.
    options = dataclasses.replace(config.task_options, eval_split="validation")
    base = dataclasses.replace(
        config, seed=config.seed + SEED, task_options=options, test_at_end=False
    )
    if rounds is not None:  # the same share of them is burn-in: a rate is chosen for sampling, too
        share = round(own.burn_in_rounds * rounds / config.rounds)
        shorter = dataclasses.replace(config.hyperparameters, burn_in_rounds=share)
        base = dataclasses.replace(base, rounds=rounds, hyperparameters=shorter)
    space = {rate: values}
    if is_all_burn_in(resolve(base)) and not is_all_burn_in(resolve(config)):
        raise refuse(
            "tune_rounds", rounds, f"none of them would sample for {config.method}: give more"
        )
    return check_sweep(Sweep(base, space, choose_search("grid", space, None, 0), by))


def check_validation(task: str, problems: Mapping[TaskOptions, Problem]) -> None:
    """Refuse to choose on the test split."""
    if any(problem.validation is None for problem in problems.values()):
        takes = "validation_share" in task_named(task).takes
        hint = "give --validation-share 0.1" if takes else f"task {task} has none"
        raise FedpaError(f"tune: there are no validation clients to choose on: {hint}")


def _is_free(config: RunConfig, name: str) -> bool:
    """Whether the method takes what it is told."""
    value = 1.2345 * getattr(config.hyperparameters, name)
    asked = dataclasses.replace(config.hyperparameters, **{name: value})
    resolved = resolve(dataclasses.replace(config, hyperparameters=asked))
    return bool(getattr(resolved.hyperparameters, name) == value)


def check_places(sweeps: Mapping[str, Sweep], out: Path) -> None:
    """Refuse sweeps of other settings that lie there, before anything is written."""
    for name, settings in sweeps.items():
        check_place(out / TUNING / name, settings)


def tune_rates(
    sweeps: Mapping[str, Sweep],
    out: Path,
    problems: Mapping[TaskOptions, Problem],
    jobs: int,
    console: Console,
    quiet: bool,
    going_on: str,
) -> dict[str, Tuned]:
    """Each method's trials; those that are done are not done again."""
    found: dict[str, Tuned] = {}
    with handle_interrupts(lambda: f" while choosing rates: {going_on}", going_on) as look:
        for name, settings in sweeps.items():
            (rate,) = settings.space
            options = resolve(settings.base).task_options
            problem = next(
                problem
                for theirs, problem in problems.items()
                if dataclasses.replace(theirs, eval_split=options.eval_split) == options
            )

            def begin(
                trial: Trial, again: bool, name: str = name, rate: str = rate
            ) -> list[Callback]:
                if not quiet:
                    about = f"{rate} {format_value(trial.params[rate])}"
                    console.print(f"choosing {name}'s rate: {about}", highlight=False)
                return [look]

            watch, trials = Watch(begin), list[Trial]()
            for part in range(1 + MOST_BEYOND):
                place = out / TUNING / (f"{name}+{part}" if part else name)
                trials += sweep(settings, place, problem, jobs=jobs, watch=watch)
                trials.sort(key=lambda trial, rate=rate: trial.params[rate])  # type: ignore[misc]
                further = find_next_rate(trials, rate)
                if further is None:
                    break
                space = {rate: (further,)}
                search = choose_search("grid", space, None, 0)
                settings = check_sweep(Sweep(settings.base, space, search, settings.by))
            if find_best(trials) is None:
                raise FedpaError(f"tune: no rate that was tried for {name} gave a number")
            metric = find_metric(settings.base.task, problem, settings.by)
            found[name] = Tuned(name, rate, trials, metric)
    return found


def find_next_rate(trials: Sequence[Trial], rate: str) -> float | None:
    """The next rate after the best, if that is at an end: as far from it as it is from the last.

    Where none is best, since all diverged, the next below the lowest.
    """
    top = find_best(trials) or trials[0]
    for end, inner in ((trials[0], trials[1]), (trials[-1], trials[-2])):
        if trials_equal(top, end):
            return float(f"{end.params[rate] ** 2 / inner.params[rate]:.3g}")
    return None


def trials_equal(one: Trial | None, other: Trial) -> bool:
    """Trials of several sweeps may have one number: parameters tell them apart."""
    return one is not None and one.params == other.params


def use_best(config: RunConfig, choice: Tuned) -> RunConfig:
    """The method's run at the rate that was best."""
    top = find_best(choice.trials)
    assert top is not None
    chosen = dataclasses.replace(config.hyperparameters, **top.params)
    return dataclasses.replace(config, hyperparameters=chosen)


def make_choices_table(choices: Mapping[str, Tuned], labels: Mapping[str, str]) -> Table:
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
        top = find_best(choice.trials)
        ends = (choice.trials[0], choice.trials[-1])
        cells = []
        for trial in choice.trials:
            at_end = any(trials_equal(trial, end) for end in ends)
            mark = "" if not trials_equal(top, trial) else ("*!" if at_end else "*")
            value = "–" if trial.value is None else format_number(sign * trial.value, ".4f")
            cells.append(f"{format_value(trial.params[choice.rate])}:\u00a0{value}{mark}")
        view.add_row(labels[name], choice.rate.split("_")[0], "  ".join(cells))
    return view


class Planned(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    burn_in: RunConfig | None
    """The run that makes its first rounds, where others begin with the same."""


def carry_out(
    planned: Sequence[Planned],
    out: Path,
    problems: Mapping[TaskOptions, Problem],
    jobs: int,
    console: Console,
    quiet: bool,
) -> None:
    """Run what is not finished yet."""
    stages = _stages(planned, out)
    going_on = f"`fedpa compare --out {shlex.quote(format_path(out))}` goes on"

    def how_far() -> str:
        done = sum(run_directory.read_summary(plan.out) is not None for plan in planned)
        return f", {done} of {len(planned)} runs are finished: {going_on}"

    with handle_interrupts(how_far, going_on) as look:
        for stage in stages:
            if jobs > 1 and len(stage) > 1:
                _side_by_side(stage, jobs, console, quiet)
            else:
                _in_turn(stage, problems, console, quiet, look)


def check_planned(
    planned: Sequence[Planned], out: Path, problems: Mapping[TaskOptions, Problem]
) -> None:
    """Refuse runs of other settings that lie there, before anything is written."""
    for plan in itertools.chain(*_stages(planned, out)):
        check_resumable(plan.config, plan.out, problems[plan.config.task_options])


def _stages(planned: Sequence[Planned], out: Path) -> "tuple[list[_Run], list[_Run]]":
    first = _burn_ins(planned, out)
    return list(first.values()), [_after(plan, first) for plan in planned]


class _Run(NamedTuple):
    label: str
    config: RunConfig
    out: Path
    branch: Path | None


def _burn_ins(planned: Sequence[Planned], out: Path) -> dict[str, _Run]:
    """The runs that make the first rounds of several others that have not begun yet."""
    found: dict[str, _Run] = {}
    for plan in planned:
        begun = bool(list_checkpoints(plan.out))
        if plan.burn_in is not None and not begun and repr(plan.burn_in) not in found:
            # By its settings: other methods, or another burn-in, leave it as it is.
            digest = hashlib.sha256(repr(plan.burn_in).encode()).hexdigest()[:8]
            place = out / run_directory.BURN_IN / f"{plan.burn_in.seed}-{digest}"
            label = f"first {plan.burn_in.rounds} rounds, seed {plan.burn_in.seed}"
            found[repr(plan.burn_in)] = _Run(label, plan.burn_in, place, None)
    return found


def _after(plan: Planned, first: Mapping[str, _Run]) -> _Run:
    made = first.get(repr(plan.burn_in))
    branch = None if made is None else made.out
    return _Run(plan.label, plan.config, plan.out, branch)


def _in_turn(
    runs: Sequence[_Run],
    problems: Mapping[TaskOptions, Problem],
    console: Console,
    quiet: bool,
    look: Callback,
) -> None:
    width = max((len(plan.label) for plan in runs), default=0)
    for plan in runs:
        over = is_run(plan.out) and read_run(plan.out).is_finished(plan.config.rounds)
        past = run_directory.past(plan.out, plan.branch)
        with watch_run(
            console,
            f"{plan.label:<{width}}",
            plan.config.rounds,
            metric=task_named(plan.config.task).metric,
            past=past,
            quiet=quiet or over,
        ) as progress:
            _perform(plan, problems[plan.config.task_options], [progress, look])


def _side_by_side(runs: Sequence[_Run], jobs: int, console: Console, quiet: bool) -> None:
    """`jobs` at a time, in processes that load the task for themselves."""
    with workers(jobs) as submit:
        pending = {submit(_alone, run, run.config): run for run in runs}
        for future in concurrent.futures.as_completed(pending):
            run = pending[future]
            try:
                ended = future.result()
            except FedpaError as error:
                raise FedpaError(f"{run.label}: {error}") from None
            if not ended:
                raise KeyboardInterrupt
            if not quiet:
                console.print(f"{run.label}: done", highlight=False)


def _alone(run: _Run, problem: Problem, look: Callback) -> bool:
    return _perform(run, problem, [look])


def _perform(plan: _Run, problem: Problem, callbacks: Sequence[Callback]) -> bool:
    """Whether it came to its end."""
    wait_for_lock(plan.out)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "all .* rounds are burn-in")  # said for all runs at once
        fit = run(
            plan.config,
            plan.out,
            resuming=True,
            callbacks=callbacks,
            problem=problem,
            branch=plan.branch,
        )
    return fit.finished
