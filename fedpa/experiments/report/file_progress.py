"""Long work on files as a person sees it: a bar on a terminal, lines at start and end elsewhere."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedpa.data.cache import Tell, show_progress

IN_BYTES = ("downloading", "unpacking")
"""First words of what is done that tell bytes; all else tells how many."""


@contextlib.contextmanager
def shown_on(console: Console) -> Iterator[None]:
    """Show the progress of what is done inside."""
    if not console.is_terminal:
        with show_progress(lambda what: _lines(console, what)):
            yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Amount(),
        TimeRemainingColumn(),
    )
    # Gone when it is done: what came of it is for the command to say.
    bars = Progress(*columns, console=console, transient=True)
    with bars, show_progress(lambda what: _bar(bars, what)):
        yield


@contextlib.contextmanager
def _bar(bars: Progress, what: str) -> Iterator[Tell]:
    task = bars.add_task(what, total=None)
    try:
        yield lambda done, total: bars.update(task, completed=done, total=total)
    finally:
        bars.remove_task(task)


@contextlib.contextmanager
def _lines(console: Console, what: str) -> Iterator[Tell]:
    last = 0
    started = time.perf_counter()

    def tell(done: int, total: int | None) -> None:
        nonlocal last
        last = done

    console.print(what, highlight=False, markup=False, soft_wrap=True)
    yield tell
    amount = f"{amount_of(what, last)}, " if last else ""
    seconds = time.perf_counter() - started
    console.print(
        f"{what}: done ({amount}{seconds:.0f} s)", highlight=False, markup=False, soft_wrap=True
    )


class _Amount(ProgressColumn):
    """How much is done of how much."""

    def render(self, task: Task) -> Text:
        done = amount_of(task.description, int(task.completed))
        total = "" if task.total is None else f" of {amount_of(task.description, int(task.total))}"
        return Text(done + total)


def amount_of(what: str, number: int) -> str:
    """Bytes in the unit a person would use, or a number with thousands apart."""
    if what.split(" ")[0] not in IN_BYTES:
        return f"{number:,}"
    return in_bytes(number)


def in_bytes(number: int) -> str:
    """11.6 MB."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
