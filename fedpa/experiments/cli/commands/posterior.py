"""`fedpa posterior`: the posterior of a run, from one more round, beside its controls."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedpa.data.federated import FederatedData, from_mapping
from fedpa.data.readers.npz import read_npz
from fedpa.errors import check_integer, refuse
from fedpa.experiments.cli.arguments import format_path, parse_words, say
from fedpa.experiments.posterior import (
    Data,
    Row,
    check_models,
    check_ood,
    describe_choice,
    fit_batch_size,
    load_ensemble,
    load_for_posterior,
    load_swag,
    make_table,
    write_files,
)
from fedpa.experiments.report.live import show_file_progress
from fedpa.experiments.report.posteriors import TABLE, tabulate
from fedpa.experiments.tasks.task import TaskOptions, task_named
from fedpa.posterior.evaluation import PredictionSettings
from fedpa.posterior.laplace import measure_curvature
from fedpa.training.loading import parse_round
from fedpa.training.loop import format_bytes
from fedpa.training.run_directory import check_writable, writing


@dataclasses.dataclass(frozen=True)
class PosteriorCommand:
    """Make the posterior of a trained run, in one more round, and compare it with its controls.

    The controls: the point estimate, temperature scaling, a posterior of one standard deviation,
    and with --ensemble several runs. posterior.safetensors, posterior.json and posterior.png are
    written to the run's directory; fedpa report shows them.

    examples:
      fedpa posterior runs/a
      fedpa posterior runs/a --structure last-layer --ood other-images.npz
      fedpa posterior runs/a --ensemble runs/b,runs/c
    """

    directory: Path = dataclasses.field(metadata={"positional": "DIR"})
    """Directory of a finished or unfinished run."""
    structure: Literal["kronecker", "last-layer", "diagonal", "low-rank"] = "kronecker"
    """Structure of the precision matrix."""
    layer: str | None = None
    """With last-layer: name of the layer, e.g. layers.1 (default: the last one shown)."""
    labels: Literal["sampled", "all"] = "sampled"
    """Whether labels are drawn from the model, or all are summed; does not apply to last-layer."""
    rank: int = 10
    """With low-rank: number of directions, at least 1."""
    params: str = "last"
    """Round of the parameters: last, best, or the number of a round that has a checkpoint."""
    draws: int = 30
    """Number of posterior draws, at least 1."""
    linearized: bool = True
    """Predict with the model linearized at its parameters; --no-linearized uses the draws' own
    outputs."""
    choice_examples: int = 2000
    """At most this many validation examples for each of the 21 trials in which the prior precision
    and the temperature are chosen."""
    ood: str | None = None
    """Examples of another kind, to measure how well uncertainty tells them apart: a .npz file of
    arrays as the task's examples have them, or the name of a task, whose test split is taken."""
    ensemble: str | None = None
    """Directories of other runs of the task, separated by commas: an ensemble of all is measured,
    too."""
    seed: int = 0
    """Random seed of labels and draws."""
    overwrite: bool = False
    """Replace the posterior that the directory contains."""


def main(argv: Sequence[str], console: Console) -> None:
    """`fedpa posterior`."""
    command = parse_words(PosteriorCommand, argv, "fedpa posterior")
    for field, least in (("draws", 1), ("choice_examples", 1), ("rank", 1), ("seed", 0)):
        check_integer(field, getattr(command, field), least)
    if (command.directory / TABLE).exists() and not command.overwrite:
        remedy = "contains a posterior: give --overwrite to replace it"
        raise refuse("DIR", str(command.directory), remedy)
    check_writable(command.directory)
    which = parse_round("params", command.params)
    named = [Path(name.strip()) for name in (command.ensemble or "").split(",") if name.strip()]
    with show_file_progress(Console(stderr=True)):
        run = load_for_posterior(command.directory, which)
        others = load_ensemble(command.directory, named, which)
        check_models(run.params, others, named)
        ood = None if command.ood is None else _open_ood(command.ood, run.config.task_options)
    problem = run.problem
    assert problem is not None
    assert problem.likelihood is not None
    if ood is not None:
        ood = check_ood(problem.likelihood, ood, problem.test)
    swag = load_swag(command.directory, run)
    most = fit_batch_size(problem.likelihood, run.params, problem.test, command.draws)
    batch_size = min(problem.eval_batch_size, most)
    predicting = PredictionSettings(command.draws, command.linearized, batch_size)
    settings: dict[str, Any] = {
        "structure": command.structure,
        "layer": command.layer,
        "labels": command.labels,
        "rank": command.rank,
        "seed": command.seed,
    }
    if problem.validation is None:
        say(
            console,
            "no validation clients: the prior precision is chosen by the marginal likelihood, and "
            "there is no temperature scaling. Train with --validation-share 0.1 to choose both by "
            "validation clients",
        )
    began = time.perf_counter()
    curvature = measure_curvature(run, problem.likelihood, problem.clients, **settings)
    seconds = time.perf_counter() - began
    posterior, rows = make_table(
        curvature,
        problem.likelihood,
        Data(problem.test, problem.validation, ood),
        predicting,
        choosing=predicting._replace(most=command.choice_examples),
        ensemble=others,
        swag=swag,
        seed=command.seed,
    )
    about = {
        "round": run.round,
        "draws": command.draws,
        "linearized": command.linearized,
        "seconds": seconds,
        **{k: v for k, v in settings.items() if v is not None},
    }
    with writing(command.directory):
        paths = write_files(command.directory, posterior, rows, about)
    console.print(make_view(rows, f"{format_path(command.directory)}, round {run.round}"))
    for sentence in describe_choice(rows):
        say(console, sentence)
    numbers = sum(x.size for x in jax.tree.leaves(posterior.density))
    say(
        console,
        f"{command.structure}: {format_bytes(4 * numbers)}, its round took {seconds:.1f} s with "
        f"compiling; written {', '.join(path.name for path in paths)}",
    )


READING = ("data_dir", "vocabulary")
"""Options of the run's task that say where data is and how it is read: they hold for --ood, too."""


def _open_ood(name: str, own: TaskOptions) -> FederatedData:
    path = Path(name)
    if path.suffix == ".npz":
        if not path.is_file():
            raise refuse("ood", name, "no such file")
        return from_mapping({path.stem: read_npz(path)})
    if path.suffix:
        raise refuse("ood", name, "must be a .npz file or the name of a task")
    task = task_named(name)
    shared = {field: getattr(own, field) for field in READING if field in task.takes}
    return task.load(TaskOptions(**shared)).test


def make_view(rows: Sequence[Row], title: str) -> Table:
    """Make the table that is printed."""
    # Eight columns fit 80 characters without a frame.
    view = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    header, cells = tabulate([row._asdict() for row in rows])
    for place, name in enumerate(header):
        view.add_column(name, justify="right" if place else "left")
    for line in cells:
        view.add_row(*line)
    return view
