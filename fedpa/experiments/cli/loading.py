"""A task's data, opened where a person sees how long that takes."""

from rich.console import Console

from fedpa.experiments.config import RunConfig
from fedpa.experiments.report.file_progress import shown_on
from fedpa.experiments.tasks.task import Problem, task_named
from fedpa.training.evaluation import curve_split


def loaded(config: RunConfig) -> Problem:
    """The task's data and model; unpacking and indexing are shown on standard error."""
    with shown_on(Console(stderr=True)):
        problem = task_named(config.task).load(config.task_options)
    curve_split(problem, config.task_options)  # refuses a split that is not there
    return problem
