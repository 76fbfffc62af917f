"""`fedpa eval` and `fedpa export`: a run's model on a split of its task, and as a file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from fedpa.errors import FedpaError, refuse
from fedpa.experiments.cli.arguments import format_path, parse_words, say
from fedpa.experiments.evaluation import add_metrics
from fedpa.experiments.report.live import show_file_progress
from fedpa.metrics.streaming import PERCENTILES, Evaluation, compute_percentiles, make_evaluator
from fedpa.training.history import line
from fedpa.training.loading import export, load, parse_round
from fedpa.training.problem import Problem


@dataclasses.dataclass(frozen=True)
class EvalCommand:
    """Evaluate a run's model on all examples of a split.

    example:
      fedpa eval runs/a --split validation --params best
    """

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """Directory of a finished or unfinished run."""
    split: Literal["test", "validation", "train"] = "test"
    """The split to evaluate on."""
    params: str = "last"
    """Round of the parameters: last, best, or the number of a round that has a checkpoint."""
    metrics: str | None = None
    """More metrics beside the task's own, separated by commas: nll, brier, ece, entropy; of a
    regression nll, rmse, coverage_90 (default: the run's --metrics)."""
    json: bool = False
    """Print one line of JSON instead of a table."""


@dataclasses.dataclass(frozen=True)
class ExportCommand:
    """Write a run's parameters to a .npz or .safetensors file. The task's data is not needed.

    example:
      fedpa export runs/a model.npz --params best
    """

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """Directory of a finished or unfinished run."""
    file: Path = dataclasses.field(metadata={"positional": "FILE"})
    """File to write, ending in .npz or .safetensors."""
    params: str = "last"
    """Round of the parameters: last, best, or the number of a round that has a checkpoint."""
    overwrite: bool = False
    """Replace an existing file."""


def evaluate(argv: Sequence[str], console: Console) -> None:
    """`fedpa eval`."""
    command = parse_words(EvalCommand, argv, "fedpa eval")
    with show_file_progress(Console(stderr=True)):
        found = load(command.directory, parse_round("params", command.params))
    if found.problem is None:
        raise FedpaError(
            f"{str(command.directory)!r} was made by fedpa.fit: its data and model are in your "
            "code. fedpa.load returns the parameters"
        )
    names = found.config.task_options.metrics if command.metrics is None else command.metrics
    evaluation = _evaluate(found.problem, names, command.split, found.params)
    if command.json:
        record: dict[str, Any] = {"round": found.round, "split": command.split}
        record |= {"clients": evaluation.clients, "examples": evaluation.examples}
        record |= evaluation.values | compute_percentiles(evaluation, list(evaluation.by_client))
        print(json.dumps(json.loads(line(record))))
        return
    console.print(_make_table(evaluation, f"{format_path(command.directory)}, round {found.round}"))
    console.print(
        f"{command.split}: {evaluation.examples:,} examples of {evaluation.clients:,} "
        f"{'client' if evaluation.clients == 1 else 'clients'}",
        highlight=False,
    )


def _evaluate(problem: Problem, names: str | None, split: str, params: object) -> Evaluation:
    splits = {"test": problem.test, "validation": problem.validation, "train": problem.clients}
    data = splits[split]
    if data is None:
        raise refuse("split", split, "the task has no validation clients: give test or train")
    return make_evaluator(add_metrics(problem, names), data, problem.eval_batch_size)(params)


def _make_table(evaluation: Evaluation, title: str) -> Table:
    """Make a table of each metric over all examples, and over clients if there are several."""
    view = Table(title=title, title_justify="left")
    view.add_column("metric")
    view.add_column("all", justify="right")
    spread = compute_percentiles(evaluation, list(evaluation.by_client))
    percentiles = PERCENTILES if spread else ()
    for p in percentiles:
        view.add_column(f"clients, {p} %", justify="right")
    for name, value in evaluation.values.items():
        cells = [spread.get(f"{name}_p{p}") for p in percentiles]
        view.add_row(
            name, f"{value:.4f}", *("" if cell is None else f"{cell:.4f}" for cell in cells)
        )
    return view


def export_params(argv: Sequence[str], console: Console) -> None:
    """`fedpa export`."""
    command = parse_words(ExportCommand, argv, "fedpa export")
    which = parse_round("params", command.params)
    t = export(command.directory, command.file, which, command.overwrite)
    say(console, f"parameters of round {t} written to {format_path(command.file)}")
