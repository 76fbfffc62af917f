"""Work that a signal must not break off half-way."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

WAITING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Ctrl-C, what schedulers send before they kill, and a terminal that is closed."""
ALARM: signal.Signals | None = getattr(signal, "SIGALRM", None)
"""A timer's; not on Windows."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """The system keeps signals until the block is done; processes that begin in it never get them.

    (Unless they ask for it. Where there is no such mask, as on Windows, nothing is held back.)
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that somebody handles wait until the block is done.

    A checkpoint that is broken off by an exception leaves threads behind that write to the same
    place as the next attempt.
    """
    if threading.current_thread() is not threading.main_thread():  # signals come to that one only
        yield
        return
    received: list[tuple[int, Any]] = []
    kept = {
        number: signal.signal(number, lambda *arrived: received.append(arrived))
        for number in (*WAITING, *([] if ALARM is None else [ALARM]))
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for number, frame in received[:1]:
            handler = kept[number]
            assert callable(handler)
            handler(number, frame)
