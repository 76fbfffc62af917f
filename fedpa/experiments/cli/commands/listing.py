"""`fedpa methods` and `fedpa tasks`: list methods and tasks, with their costs and data."""

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
    """List methods: what they send, keep and cost, and whether what they send adds up."""

    json: bool = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True)
class TasksCommand:
    """List tasks, their models and presets, and the data they need."""

    data_dir: str | None = None
    """Look for data sets only in this directory (default: $FEDPA_DATA, then
    ~/.local/share/fedpa)."""
    json: bool = False
    """Print JSON."""


def list_methods(argv: Sequence[str], console: Console) -> None:
    """`fedpa methods`."""
    command = parse_words(MethodsCommand, argv, "fedpa methods")
    described = {name: describe_method(method) for name, method in sorted(METHODS.items())}
    if command.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    for note in NOTES:
        console.print(Text(note))
    for group in GROUPS:
        console.print(Text(f"\n{group}", style="underline"))
        for name, method in described.items():
            if method["group"] == group:
                _print_method(name, method, console)


def _print_method(name: str, method: dict[str, Any], console: Console) -> None:
    facts = {key: method[key] for key in ("sends", "keeps", "cost")}
    listed = [f"{key} {'nothing' if fact == '–' else fact}" for key, fact in facts.items()]
    listed.append(f"secure sums {method['secure_sums']}")
    console.print(Text(name, style="bold"))
    for line in (method["summary"], "; ".join(listed)):
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def describe_method(method: NamedMethod) -> dict[str, Any]:
    """Describe the method as plain values."""
    plain, posterior, controls = GROUPS
    return {
        "label": method.label,
        "group": controls if method.control_of else posterior if method.samples else plain,
        "summary": method.summary,
        "sends": method.sends,
        "keeps": method.keeps,
        "cost": method.cost,
        "secure_sums": method.secure_sums,
        "options": list(method.takes),
    }


GROUPS = ("FedAvg, its relatives and other baselines", "FedPA and global precision", "controls")
NOTES = (
    "θ: the model; θ₀: the model that a client receives; Δ: a client's update; M: local epochs; "
    "ℓ: posterior samples; ρ: shrinkage; ∇f: a client's gradient at θ over all of its examples; "
    "∇f̂: over mini-batches.",
    "sends: from the server to a client / from the client to the server. Each is as large as the "
    "model, except the number ‖Δ‖² and Z, which is at most that large and sent every k-th round.",
    "keeps: state between rounds, in addition to θ and the server optimizer's state.",
    "cost: a client's computation per round, relative to FedAvg with M epochs.",
    "secure sums: whether the server needs only weighted sums of what clients send, so that secure "
    "aggregation can hide each client's.",
    "s: the server's momentum, or its two moments; c: a mean gradient; c_i: a client's, stored by "
    "the client; A, L: the precision of layers' inputs and its Cholesky factor, inputs² numbers "
    "per layer; Z: a sketch of A.",
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
    """Describe the task as plain values."""
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
    return "bundled" if data["dataset"] is None else f"{data['dataset']} in {data['path']}"
