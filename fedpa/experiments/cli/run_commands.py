"""Shared code of the commands that train: data and signals."""

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
"""A timer's signal; not on Windows."""
GRACE = 2.0
"""Seconds that a round may take to end after a signal."""


def load_problem(config: RunConfig) -> Problem:
    """Load the task's data and model; show unpacking and indexing on standard error."""
    with show_file_progress(Console(stderr=True)):
        problem = task_named(config.task).load(config.task_options)
    curve_split(problem, config.task_options)  # refuses a missing split
    return problem


@contextlib.contextmanager
def handle_interrupts(how_far: Callable[[], str], going_on: str) -> Iterator[Callback]:
    """On Ctrl-C, SIGTERM and SIGHUP save the last round, print how to resume, and end the command.

    how_far: text after "interrupted".
    going_on: what to do once the cause of an error is removed.

    Yields a callback that ends the run after its round. Raising from the signal handler is not
    safe: an exception between taking a lock and recording that can deadlock threads, and one in
    JAX's garbage collection is lost. So it is raised only if the round takes long or the signal
    comes again.
    """
    received: list[int] = []
    begun = False

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 2:
            os._exit(128 + number)  # files are complete at any time
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

    # An ignored signal (`nohup`) stays ignored.
    kept = {
        number: signal.signal(number, interrupt)
        for number in WAITING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    if ALARM is not None:
        kept[ALARM] = signal.signal(ALARM, too_long)
    try:
        yield look
    except KeyboardInterrupt:  # the run has saved its state by now
        print(f"interrupted{how_far()}", file=sys.stderr)
        while kept:  # the process is ending: ignore another Ctrl-C
            signal.signal(kept.popitem()[0], signal.SIG_IGN)
        sys.exit(128 + (received[0] if received else signal.SIGINT))
    except FedpaError as error:
        if not begun or isinstance(error, NoUsableClientError):  # resumed, it would fail again
            raise
        raise FedpaError(f"{error}; once that is resolved, {going_on}") from None
    finally:
        if ALARM is not None:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in kept.items():
            signal.signal(number, handler)
