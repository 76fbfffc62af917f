"""What the commands that train have in common: their data and their end."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rich.console import Console

from fedpa.errors import FedpaError, NoUsableClientError
from fedpa.experiments.config import RunConfig
from fedpa.experiments.evaluation import curve_split
from fedpa.experiments.report.live import show_file_progress
from fedpa.experiments.tasks.task import task_named
from fedpa.experiments.workers import WAITING
from fedpa.training.callbacks import Callback, Event
from fedpa.training.problem import Problem

C = TypeVar("C")
ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)
"""A timer's; not on Windows."""
GRACE = 2.0
"""Seconds that a round has to end in peace."""


def load_problem(config: RunConfig) -> Problem:
    """The task's data and model; unpacking and indexing are shown on standard error."""
    with show_file_progress(Console(stderr=True)):
        problem = task_named(config.task).load(config.task_options)
    curve_split(problem, config.task_options)  # refuses a split that is not there
    return problem


@contextlib.contextmanager
def handle_interrupts(how_far: Callable[[], str], going_on: str) -> Iterator[Callback]:
    """Ctrl-C, SIGTERM and SIGHUP save the last round, say how to resume, and end the command.

    how_far: what is said behind "interrupted".
    going_on: what to do once an error is mended.

    Gives a callback for the run, which ends it after its round. An exception that a signal raises
    anywhere may come between taking a lock and knowing it, and then threads wait for ever; or where
    Python can't pass it on (in JAX's part of garbage collection), and is lost. So that is done only
    to a round that takes long, or when the signal comes again.
    """
    received: list[int] = []
    begun = False

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 2:
            os._exit(128 + number)  # files are whole at any time
        if len(received) == 2 or ALARM is None:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, GRACE)

    def too_long(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def look(event: Event) -> None:
        nonlocal begun
        begun = True
        if received:
            raise KeyboardInterrupt

    # A signal that is ignored (`nohup`) stays so.
    kept = {
        number: signal.signal(number, interrupt)
        for number in WAITING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    if ALARM is not None:
        kept[ALARM] = signal.signal(ALARM, too_long)
    try:
        yield look
    except KeyboardInterrupt:  # by now the run has saved what it has
        print(f"interrupted{how_far()}", file=sys.stderr)
        while kept:  # the process ends: one more Ctrl-C has nothing left to say
            signal.signal(kept.popitem()[0], signal.SIG_IGN)
        sys.exit(128 + (received[0] if received else signal.SIGINT))
    except FedpaError as error:
        if not begun or isinstance(error, NoUsableClientError):  # resumed, it would fail again
            raise
        raise FedpaError(f"{error}; once that is mended, {going_on}") from None
    finally:
        if ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in kept.items():
            signal.signal(number, handler)
