"""A task ties data, model, metrics and default settings together; one file per task."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedpa.discovery import defined
from fedpa.errors import refuse
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.training.problem import Problem


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
    if name in defined("fedpa.experiments.tasks", "TASK"):
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
    return defined("fedpa.experiments.tasks", "TASK") | _own


def task_named(name: str) -> Task:
    known = tasks()
    if name not in known:
        raise refuse("task", name, f"unknown task; choose from {', '.join(known)}")
    return known[name]


def preset_named(task: str, name: str | None) -> tuple[str, Preset]:
    """The preset of this name; the task's first without one."""
    presets = task_named(task).presets
    if name is None:
        name = next(iter(presets))
    if name not in presets:
        raise refuse("preset", name, f"task {task} has {', '.join(presets)}")
    return name, presets[name]
