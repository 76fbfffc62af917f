"""How far `fedpa.fit` is, on stderr: a bar on a terminal, else a line every tenth of the rounds."""

import contextlib
import sys
from collections.abc import Iterator

from fedpa.training.callbacks import Callback, Event

LINES = 10
"""How many lines a run has where there is no terminal."""
_SHOWN = ("train/loss", "eval/", "valid/")


@contextlib.contextmanager
def show_progress(progress: bool | None) -> Iterator[list[Callback]]:
    """Give the callbacks that show a run's rounds.

    progress: None shows them on a terminal only. Nothing is shown of a run that has no rounds left.
    """
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield []
    elif not terminal:
        yield [_print_line]
    else:
        with contextlib.ExitStack() as stack:
            yield [_bar(stack)]


def _print_line(event: Event) -> None:
    t, rounds = event.round, event.rounds
    if t * LINES // rounds > (t - 1) * LINES // rounds:
        print(f"round {t}/{rounds}  {_values(event)}", file=sys.stderr, flush=True)


def _bar(stack: contextlib.ExitStack) -> Callback:
    """A bar from the first round on."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.description}")
    bar = Progress(*columns, console=Console(stderr=True))

    def callback(event: Event) -> None:
        if not bar.tasks:
            stack.enter_context(bar)
            bar.add_task("", total=event.rounds)
        bar.update(bar.tasks[0].id, completed=event.round, description=_values(event))

    return callback


def _values(event: Event) -> str:
    """The round's loss and evaluations, the first few."""
    names = [name for name in event.record if name.startswith(_SHOWN)]
    return "  ".join(f"{name} {event.record[name]:.4g}" for name in names[:4])
