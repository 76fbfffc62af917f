"""`fedpa methods` and `fedpa tasks`: what can be run, by which methods, and what each needs."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedpa.experiments.catalogue import find_dataset
from fedpa.experiments.cli.arguments import parse_words
from fedpa.experiments.methods import METHODS, NamedMethod
from fedpa.experiments.tasks.task import Task, tasks


@dataclasses.dataclass(frozen=True)
class MethodsCommand:
    """List methods: what they send, keep and cost."""

    json: bool = False
    """As JSON, for programs."""


@dataclasses.dataclass(frozen=True)
class TasksCommand:
    """List tasks, their models and presets, and the data they need."""

    data_dir: str | None = None
    """Where data sets lie; FEDPA_DATA or the user's data directory if not given."""
    json: bool = False
    """As JSON, for programs."""


def list_methods(argv: Sequence[str], console: Console) -> None:
    """`fedpa methods`."""
    command = parse_words(MethodsCommand, argv, "fedpa methods")
    described = {name: describe_method(method) for name, method in sorted(METHODS.items())}
    if command.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    for name, method in described.items():
        facts = {key: method[key] for key in ("sends", "keeps", "cost")}
        listed = (f"{key} {'nothing' if fact == '–' else fact}" for key, fact in facts.items())
        console.print(Text(f"{name}: {method['summary']}"))
        console.print(Padding(Text("; ".join(listed)), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(Text(NOTES))


def describe_method(method: NamedMethod) -> dict[str, Any]:
    """The method as plain values."""
    return {
        "label": method.label,
        "summary": method.summary,
        "sends": method.sends,
        "keeps": method.keeps,
        "cost": method.cost,
        "options": list(method.takes),
    }


NOTES = (
    "sends: to a client / from it; each is as large as the model, but for ‖Δ‖² and Z. s: the "
    "server's momentum, or two moments; c: a mean gradient; c_i: a client's, kept by it from round "
    "to round; Z, every k-th round: what layers' inputs tell of their precision A, at most as "
    "large; A and its Cholesky factor L: inputs² of each layer. "
    "keeps: beside θ and the server optimizer's state. cost: a client's work in a round, FedAvg's "
    "with M epochs being 1."
)


def list_tasks(argv: Sequence[str], console: Console) -> None:
    """`fedpa tasks`."""
    command = parse_words(TasksCommand, argv, "fedpa tasks")
    described = {name: describe_task(task, command.data_dir) for name, task in tasks().items()}
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


def describe_task(task: Task, data_dir: str | None) -> dict[str, Any]:
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
