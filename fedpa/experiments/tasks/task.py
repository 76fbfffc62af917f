"""A task ties data, model, metrics and default settings together; one file per task."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedpa.errors import check_integer, find_name, match_name, refuse, suggest
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.lazy import find_components

if TYPE_CHECKING:
    from fedpa.training.problem import Problem


EvalSplit = Literal["auto", "validation", "test"]
Choices = Mapping[str, tuple[Any, ...]]
"""Field of `Hyperparameters` → its values."""


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of a task, besides the algorithm's: data, model, evaluation.

    What is not given (None) is the task's own choice; each task says which it takes.
    """

    data_dir: str | None = None
    """Directory with the data set's archive or its unpacked files (default: $FEDPA_DATA, then
    ~/.local/share/fedpa)."""
    dataset: str | None = None
    """One of the task's data sets (default: the first that is found, see fedpa tasks)."""
    model: str | None = None
    """One of the task's models (default: the preset's, see fedpa tasks)."""
    max_examples: int | None = None
    """At most this many examples per client (default: all)."""
    vocabulary: int | None = None
    """stackoverflow: vocabulary size, at least 1 (default: 10000)."""
    tags: int | None = None
    """stackoverflow-lr: number of tags, at least 1 (default: 500)."""
    words: int | None = None
    """stackoverflow-lr: distinct words per example, at least 1 (default: 64)."""
    groups: int | None = None
    """cifar100: groups of the group norm, at least 1 (default: 32 for resnet18)."""
    prior_sd: float | None = None
    """Standard deviation > 0 of a normal prior with mean 0 over all parameters, counted once: its
    share of the mean loss is −log p(θ)/n, n the examples of all training clients (default: no
    prior)."""
    label_skew: float | None = None
    """emnist: partition the training examples again, over as many clients, with Dirichlet label
    skew of this concentration > 0; at 0.1 most clients have one to three labels (default: the
    data's own clients)."""
    partition_seed: int | None = None
    """Random seed of a partition into clients, at least 0 (default: 0)."""
    validation_share: float | None = None
    """Share of the training clients held out for validation, in [0, 1) (default: 0)."""
    eval_split: EvalSplit = "auto"
    """What curves (eval/…) are evaluated on; auto: validation clients if there are any, else the
    test split."""
    eval_examples: int = 10_000
    """At most this many examples per evaluation, always of the same clients. The test at the end
    takes all."""
    metrics: str | None = None
    """More metrics that are evaluated beside the task's own, separated by commas: nll, brier, ece,
    entropy; of a regression nll, rmse, coverage_90 (default: none)."""


class Grid(NamedTuple):
    """The values hyperparameters are chosen from, in two steps, as in the paper."""

    training: Choices
    """On FedAvg: rates and local work."""
    sampling: Choices
    """Then, with those fixed, on FedPA: when sampling begins, and the shrinkage."""


def make_grid(
    server_rates: tuple[float, ...],
    client_rates: tuple[float, ...],
    epochs: tuple[int, ...] = (2, 5, 10, 20),
    burn_in: tuple[int, ...] = (100, 200, 400, 600, 800),
    rho: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0),
) -> Grid:
    """A grid over learning rates, epochs, burn-in rounds and ρ; defaults: the paper's (appendix D).

    A laptop preset has the paper's grid where it makes sense in so few rounds: rates around its
    own, fewer epochs, burn-in rounds that leave some for sampling.
    """
    rates = {"server_learning_rate": server_rates, "client_learning_rate": client_rates}
    return Grid({**rates, "epochs": epochs}, {"burn_in_rounds": burn_in, "rho": rho})


class Preset(NamedTuple):
    """Default settings of a task's runs, and how tables and sweeps judge them."""

    rounds: int
    clients_per_round: int
    hyperparameters: Hyperparameters
    options: TaskOptions = TaskOptions()
    eval_every: int = 1
    summary: str = "its own settings"
    targets: tuple[float, ...] = ()
    """Tables give the rounds until the metric's running average reaches each."""
    last: int = 10
    """Final values are means of the evaluations in this many last rounds."""
    seeds: int = 1
    """Seeds of `fedpa compare`, if their number is not given."""
    grid: Grid | None = None
    """What `fedpa sweep` tries; without one it needs a space of the user's."""


class Task(NamedTuple):
    summary: str
    load: "Callable[[TaskOptions], Problem]"
    """Imports model, data and JAX when it is called: a list of tasks needs none of them."""
    presets: Mapping[str, Preset]
    """By name; the first is the default."""
    compared: tuple[str, ...] = ("fedavg-1", "fedavg", "fedpa", "mean-scaled")
    """The methods `fedpa compare` runs if none are named."""
    metric: str = "accuracy"
    """The metric that tables and curves show, higher being better."""
    takes: tuple[str, ...] = ()
    """The fields of `TaskOptions` it knows."""
    datasets: tuple[str, ...] = ()
    """Names in the catalogue, any of which will do, the first that is found; () if it brings its
    data along."""
    models: Mapping[str, int] = {}
    """Its models by name, with their numbers of parameters at full size."""


def own_task(
    load: "Callable[[TaskOptions], Problem]",
    preset: Preset,
    metric: str = "accuracy",
    takes: tuple[str, ...] = ("data_dir",),
) -> Task:
    """Make your own task, with one preset; a module names it `TASK`.

    load: options → data and model. metric: what tables show, higher being better. takes: which of
    the options it reads.
    """
    methods = ("fedavg", "fedpa")
    return Task("your own task", load, {"own": preset}, methods, metric, takes)


def tasks() -> dict[str, Task]:
    """All tasks of fedpa: every file of this package that defines `TASK`, by its name with dashes.

    Your own task is not listed: its name is that of its module (`task_named`).
    """
    return find_components("fedpa.experiments.tasks", "TASK")


def task_named(name: str) -> Task:
    """The task of this name: one of fedpa's, or `package.module` for the `TASK` of that module.

    `package.module:NAME` is another object of it. A module is imported wherever the task is needed:
    by commands, their workers, Flower's nodes, `fedpa.load`. The working directory is searched
    last.
    """
    if "." in name or ":" in name:
        return _import_task(name)
    known = tasks()
    found = match_name(name, known)
    if found is None:
        own = "your own module that defines TASK is named as package.module"
        raise refuse("task", name, f"unknown task; {suggest(name, known)} ({own})")
    return known[found]


def _import_task(name: str) -> Task:
    module, _, attribute = name.partition(":")
    attribute = attribute or "TASK"
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise refuse("task", name, "must be package.module or package.module:NAME")
    if "" not in sys.path:  # the working directory, as for `python -m`: `fedpa` itself has it not
        sys.path.append("")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise refuse(
            "task",
            name,
            f"can't be imported ({error}): install the package, or put its directory on PYTHONPATH",
        ) from error
    if not isinstance(found, Task):
        raise refuse("task", name, f"{module}.{attribute} must be a task, as own_task(…) makes it")
    return found


def preset_named(task: str, name: str | None) -> tuple[str, Preset]:
    """The preset of this name; the task's first without one."""
    presets = task_named(task).presets
    if name is None:
        name = next(iter(presets))
    name = find_name("preset", name, presets, f"preset of task {task}")
    return name, presets[name]


ALWAYS = ("prior_sd", "eval_split", "eval_examples", "metrics")
"""Options of every task."""


def check_task_options(task: str, options: TaskOptions, takes: tuple[str, ...]) -> None:
    """Refuse what the task does not take, and values out of range."""
    if options.data_dir is not None and "data_dir" not in takes and not task_named(task).datasets:
        raise refuse(
            "data_dir", options.data_dir, f"task {task} has bundled data; remove --data-dir"
        )
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in (*takes, *ALWAYS) and value is not None:
            known = f"it takes {', '.join(takes)}" if takes else "it takes none"
            raise refuse(field.name, value, f"does not apply to task {task}; {known}")
    for name in ("max_examples", "vocabulary", "tags", "words", "groups", "eval_examples"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name), 1)
    if options.partition_seed is not None:
        check_integer("partition_seed", options.partition_seed, 0)
    if options.eval_split not in ("auto", "validation", "test"):
        raise refuse("eval_split", options.eval_split, "must be auto, validation or test")
    for name in ("prior_sd", "label_skew"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise refuse(name, value, "must be a finite number > 0")
    share = options.validation_share
    if share is not None and not 0 <= share < 1:
        raise refuse("validation_share", share, "must be a share of the clients, in [0, 1)")
