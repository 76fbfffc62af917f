"""`fedpa tasks`: what can be run, with which models and presets, and whether its data is there."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedpa.experiments.catalogue import find_dataset
from fedpa.experiments.cli.arguments import parse_words
from fedpa.experiments.tasks.task import Task, tasks


@dataclasses.dataclass(frozen=True)
class TasksCommand:
    """List tasks, their models and presets, and the data they need."""

    data_dir: str | None = None
    """Where data sets lie; FEDPA_DATA or the user's data directory if not given."""
    json: bool = False
    """As JSON, for programs."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(TasksCommand, argv, "fedpa tasks")
    described = {name: described_task(task, command.data_dir) for name, task in tasks().items()}
    if command.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    for name, task in described.items():
        console.print(f"{name}: {task['summary']}", highlight=False, markup=False)
        models = ", ".join(
            f"{model} ({size:,} parameters)" for model, size in task["models"].items()
        )
        presets = "; ".join(f"{key} ({text})" for key, text in task["presets"].items())
        facts = {"models": models, "presets": presets, "metric": task["metric"]}
        view = Table.grid(padding=(0, 2, 0, 0))
        for fact, text in (facts | {"data": _data(task["data"])}).items():
            view.add_row(f"  {fact}", text)
        console.print(view)


def described_task(task: Task, data_dir: str | None) -> dict[str, Any]:
    """The task as plain values."""
    places = {name: find_dataset(name, data_dir) for name in task.datasets}
    here = next(((name, path) for name, path in places.items() if path is not None), None)
    data: dict[str, Any] = {"found": True, "dataset": None}
    if task.datasets:
        data = {
            "found": here is not None,
            "dataset": None if here is None else here[0],
            "path": None if here is None else str(here[1]),
            "get": f"fedpa data get {task.datasets[0]}",
        }
    return {
        "summary": task.summary,
        "metric": task.metric,
        "models": dict(task.models),
        "presets": {name: preset.summary for name, preset in task.presets.items()},
        "options": list(task.takes),
        "data": data,
    }


def _data(data: dict[str, Any]) -> str:
    if not data["found"]:
        return f"missing: {data['get']}"
    return "comes along" if data["dataset"] is None else f"{data['dataset']} in {data['path']}"
