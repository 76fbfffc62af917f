"""One file per task: data, model, metrics and defaults."""

from fedpa.tasks.task import Defaults, Problem, Task, task_named, tasks

__all__ = ["Defaults", "Problem", "Task", "task_named", "tasks"]
