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
    """A callback that shows the round, its phase and the current metrics."""
    if not console.is_terminal:

        def lines(event: Event) -> None:
            if event.round % max(rounds // LINES, 1) == 0 or event.round == rounds:
                console.print(f"{label}  round {event.round}/{rounds}  {_metrics(event.record)}")

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
            progress.update(task, completed=event.round, metrics=_metrics(event.record))

        yield bar


def _metrics(record: dict[str, Any]) -> str:
    shown = [record["phase"]]
    for key, value in record.items():
        # The distribution over clients is in the files: a line has room for few numbers.
        if key.startswith("eval/") and not key.endswith(("_p10", "_p50", "_p90")):
            shown.append(f"{key.removeprefix('eval/')} {value:.4g}")
    if record["train/rejected"]:
        shown.append(f"rejected {record['train/rejected']}")
    return "  ".join(shown)
