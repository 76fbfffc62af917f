"""`fedpa methods`: what each method is, what it sends, what it keeps, what a round of it costs."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedpa.experiments.cli.arguments import parse_words
from fedpa.experiments.methods import METHODS, NamedMethod

SUMMARY = "list methods: what they send, keep and cost"


@dataclasses.dataclass(frozen=True)
class MethodsCommand:
    """List methods: what they send, keep and cost."""

    json: bool = False
    """As JSON, for programs."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(MethodsCommand, argv, "fedpa methods", MethodsCommand())
    described = {name: described_method(method) for name, method in sorted(METHODS.items())}
    if command.json:
        print(json.dumps(described, indent=2, ensure_ascii=False))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("method", "what it is", "sends ↓ / ↑", "keeps", "cost"):
        table.add_column(heading, no_wrap=heading != "what it is")
    for name, method in described.items():
        table.add_row(name, *(method[key] for key in ("summary", "sends", "keeps", "cost")))
    console.print(table)
    console.print(NOTES, highlight=False, markup=False)


def described_method(method: NamedMethod) -> dict[str, Any]:
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
