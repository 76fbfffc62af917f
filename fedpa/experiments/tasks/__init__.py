"""One file per task: data, model, metrics and defaults."""

from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import (
    Defaults,
    Preset,
    Problem,
    Task,
    own_task,
    task_named,
    tasks,
)

__all__ = [
    "Defaults",
    "Preset",
    "Problem",
    "Task",
    "TaskOptions",
    "own_task",
    "task_named",
    "tasks",
]
