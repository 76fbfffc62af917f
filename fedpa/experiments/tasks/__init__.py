"""One file per task: its settings, and how its data and model are loaded."""

from typing import TYPE_CHECKING

from fedpa.experiments.tasks.task import Preset, Task, TaskOptions, own_task, task_named, tasks
from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

make_lazy(__name__, {"fedpa.training.problem": ("Problem",)})

__all__ = ["Preset", "Problem", "Task", "TaskOptions", "own_task", "task_named", "tasks"]
