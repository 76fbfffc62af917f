"""What a command says and does when its run ends before its time."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedpa.errors import FedpaError, NoUsableClientError
from fedpa.experiments.cli.arguments import shown
from fedpa.experiments.workers import WAITING
from fedpa.training import run_directory
from fedpa.training.callbacks import Callback, Event
from fedpa.training.checkpoint import list_checkpoints

ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)
"""A timer's; not on Windows."""
GRACE = 2.0
"""Seconds that a round has to end in peace."""


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[Callback]:
    """Ctrl-C, SIGTERM and SIGHUP save the last round, say how to go on, and end the command."""

    def how_far() -> str:
        return f" {_how_far(out)}: {how_to_go_on(out)}" if run_directory.is_run(out) else ""

    with interruptible(how_far, how_to_go_on(out)) as look:
        yield look


@contextlib.contextmanager
def interruptible(how_far: Callable[[], str], going_on: str) -> Iterator[Callback]:
    """The same for any work that can be gone on with.

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


def how_to_go_on(out: Path) -> str:
    return f"`fedpa resume {shown(out)}` goes on"


def _how_far(out: Path) -> str:
    done = list_checkpoints(out)
    return f"after round {done[-1]}" if done else "before the first round was done"
