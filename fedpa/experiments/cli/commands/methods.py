"""`fedpa methods`: what each method is, what it sends, what it keeps, what a round of it costs."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from fedpa.experiments.cli.arguments import parse_words
from fedpa.experiments.methods import METHODS, NamedMethod


@dataclasses.dataclass(frozen=True)
class MethodsCommand:
    """List methods: what they send, keep and cost."""

    json: bool = False
    """As JSON, for programs."""


def main(argv: Sequence[str], console: Console) -> None:
    command = parse_words(MethodsCommand, argv, "fedpa methods")
    described = {name: described_method(method) for name, method in sorted(METHODS.items())}
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
