"""A task ties data, model, metrics and default settings together; one file per task."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fedpa.algorithms.hyperparameters import Hyperparameters
from fedpa.data.federated import FederatedData
from fedpa.discovery import defined
from fedpa.errors import refuse
from fedpa.objectives.objective import Reduction
from fedpa.objectives.sparse_table import SparseTable
from fedpa.types import Key, Loss, Regularizer


class Problem(NamedTuple):
    """A task's data and model, loaded."""

    clients: FederatedData
    init: Callable[[Key], Any]
    """key → a fresh model, any pytree."""
    loss: Loss
    evaluate: Callable[[Any], dict[str, float]]
    """model → metrics on the held-out test split."""
    regularizer: Regularizer | None = None
    reduction: Reduction = "mean"
    sparse: SparseTable | None = None


class Defaults(NamedTuple):
    """What a run of the task uses unless told otherwise."""

    rounds: int
    clients_per_round: int
    hyperparameters: Hyperparameters


class Task(NamedTuple):
    summary: str
    load: Callable[[], Problem]
    defaults: Callable[[str], Defaults]
    """method → its default settings on this task."""
    compared: tuple[str, ...]
    """The methods `fedpa compare` runs if none are named."""
    metric: str
    """The metric that tables and curves show, higher being better."""
    targets: tuple[float, ...]
    """Tables give the rounds until the metric's running average reaches each."""
    last: int
    """Final values are means of the evaluations in this many last rounds."""


def tasks() -> dict[str, Task]:
    """All tasks: every file of this package that defines `TASK`, by its name with dashes."""
    return defined("fedpa.tasks", "TASK")


def task_named(name: str) -> Task:
    known = tasks()
    if name not in known:
        raise refuse("task", name, f"unknown task; choose from {', '.join(known)}")
    return known[name]
