"""Progress a person can watch: a live bar on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedpa.training.callbacks import Callback, Event

LINES = 10
"""How many plain lines a run prints where there is no terminal."""


@contextlib.contextmanager
def watched(console: Console, label: str, rounds: int) -> Iterator[Callback]:
    """A callback that shows the round, its phase and the latest metrics."""
    latest: dict[str, float] = {}

    def now(event: Event) -> str:
        # Not every round is evaluated: what the last one gave stays in sight.
        latest.update(_evaluated(event.record))
        return _metrics(event.record, latest)

    if not console.is_terminal:

        def lines(event: Event) -> None:
            text = now(event)
            if event.round % max(rounds // LINES, 1) == 0 or event.round == rounds:
                console.print(f"{label}  round {event.round}/{rounds}  {text}", soft_wrap=True)

        yield lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metrics]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=rounds, metrics="compiling")

        def bar(event: Event) -> None:
            progress.update(task, completed=event.round, metrics=now(event))

        yield bar


def _evaluated(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of the curves; the distribution over clients is in the files."""
    shown = (key for key in record if key.startswith("eval/"))
    return {
        key.removeprefix("eval/"): record[key]
        for key in shown
        if not key.endswith(("_p10", "_p50", "_p90"))
    }


def _metrics(record: dict[str, Any], latest: dict[str, float]) -> str:
    shown = [record["phase"], *(f"{name} {value:.4g}" for name, value in latest.items())]
    if record["train/rejected"]:
        shown.append(f"rejected {record['train/rejected']}")
    return "  ".join(shown)
