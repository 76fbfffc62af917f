"""A task ties data, model, metrics and default settings together; one file per task."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedpa.algorithms.hyperparameters import Hyperparameters
from fedpa.data.federated import FederatedData
from fedpa.discovery import defined, find_name
from fedpa.errors import refuse
from fedpa.metrics.metric import Metric
from fedpa.objectives.objective import Reduction
from fedpa.objectives.sparse_table import SparseTable
from fedpa.tasks.options import TaskOptions
from fedpa.types import Examples, Key, Loss, Losses, Regularizer


class Problem(NamedTuple):
    """A task's data and model, loaded."""

    clients: FederatedData
    """Who trains."""
    init: Callable[[Key], Any]
    """key → a fresh model, any pytree."""
    loss: Loss
    metric: Metric
    test: FederatedData
    validation: FederatedData | None = None
    """Who decides what is chosen."""
    regularizer: Regularizer | None = None
    reduction: Reduction = "mean"
    sparse: SparseTable | None = None
    weight: Callable[[Examples], Losses] | None = None
    eval_batch_size: int = 100
    dataset: str | None = None
    """Which of the task's data sets it is; None if the task brings its own."""


class Defaults(NamedTuple):
    """What a run of the task uses unless told otherwise."""

    rounds: int
    clients_per_round: int
    hyperparameters: Hyperparameters
    options: TaskOptions = TaskOptions()
    eval_every: int = 1


class Preset(NamedTuple):
    summary: str
    defaults: Defaults
    targets: tuple[float, ...]
    """Tables give the rounds until the metric's running average reaches each."""
    last: int
    """Final values are means of the evaluations in this many last rounds."""


class Task(NamedTuple):
    summary: str
    load: Callable[[TaskOptions], Problem]
    presets: Mapping[str, Preset]
    """By name; the first is the default."""
    compared: tuple[str, ...]
    """The methods `fedpa compare` runs if none are named."""
    metric: str
    """The metric that tables and curves show, higher being better."""
    takes: tuple[str, ...] = ()
    """The fields of `TaskOptions` it knows."""
    datasets: tuple[str, ...] = ()
    """Names in the catalogue, any of which will do, the first that is found; () if it brings its
    data along."""
    models: Mapping[str, int] = {}
    """Its models by name, with their numbers of parameters at full size."""


_own: dict[str, Task] = {}


def register(name: str, task: Task) -> None:
    """Make a task of your own known by a name that none of fedpa's has.

    In this process: others, as the workers of `--jobs`, know it if what they import registers it.
    """
    if name in defined("fedpa.tasks", "TASK"):
        raise refuse("task", name, "is one of fedpa's own: choose another name")
    _own[name] = task


def own_task(
    load: Callable[[TaskOptions], Problem],
    defaults: Defaults,
    metric: str = "accuracy",
    takes: tuple[str, ...] = ("data_dir",),
) -> Task:
    """A task with one set of defaults, for `register`.

    load: options → data and model. metric: what tables show, higher being better. takes: which of
    the options it reads.
    """
    presets = {"own": Preset("its own settings", defaults, targets=(), last=10)}
    return Task("a task of your own", load, presets, ("fedavg", "fedpa"), metric, takes)


def tasks() -> dict[str, Task]:
    """All tasks: every file of this package that defines `TASK`, by its name with dashes; and
    those that were registered.
    """
    return defined("fedpa.tasks", "TASK") | _own


def task_named(name: str) -> Task:
    known = tasks()
    return known[find_name("task", name, known)]


def preset_named(task: str, name: str | None) -> tuple[str, Preset]:
    """The preset of this name; the task's first without one."""
    presets = task_named(task).presets
    if name is None:
        name = next(iter(presets))
    name = find_name("preset", name, presets, f"preset of task {task}")
    return name, presets[name]
