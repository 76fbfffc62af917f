"""A task ties data, model, metrics and default settings together; one file per task."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from fedpa.errors import find_name, match_name, refuse, suggest
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.lazy import find_components

if TYPE_CHECKING:
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
    load: "Callable[[TaskOptions], Problem]"
    """Imports model, data and JAX when it is called: a list of tasks needs none of them."""
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


def own_task(
    load: "Callable[[TaskOptions], Problem]",
    defaults: Defaults,
    metric: str = "accuracy",
    takes: tuple[str, ...] = ("data_dir",),
) -> Task:
    """Make a task of your own, with one set of defaults; a module names it `TASK`.

    load: options → data and model. metric: what tables show, higher being better. takes: which of
    the options it reads.
    """
    presets = {"own": Preset("its own settings", defaults, targets=(), last=10)}
    return Task("a task of your own", load, presets, ("fedavg", "fedpa"), metric, takes)


def tasks() -> dict[str, Task]:
    """All tasks of fedpa: every file of this package that defines `TASK`, by its name with dashes.

    A task of your own is not listed: its name is its module's (`task_named`).
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
        own = "a module of your own that defines TASK is named as package.module"
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
