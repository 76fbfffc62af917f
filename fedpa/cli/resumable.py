"""What a command says and does when its run ends before its time."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedpa.cli.arguments import shown
from fedpa.errors import FedpaError
from fedpa.training import checkpoints, run_directory
from fedpa.training.callbacks import Callback, Event

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of Ctrl-C and of SIGTERM, by which schedulers announce that they will kill."""


@contextlib.contextmanager
def resumable(out: Path) -> Iterator[Callback]:
    """Ctrl-C and SIGTERM save the last round, say how to go on, and end the command.

    Gives a callback for the run: an exception raised where Python can't pass it on (in JAX's part
    of garbage collection) is lost, so the end of each round looks for a signal once more.
    """
    received: list[int] = []
    begun = False

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    def look(event: Event) -> None:
        nonlocal begun
        begun = True
        if received:
            raise KeyboardInterrupt

    # A signal that is ignored (`nohup`) stays so.
    kept = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield look
    except KeyboardInterrupt:  # by now the run has saved what it has
        said = f" {_how_far(out)}: {how_to_go_on(out)}" if run_directory.is_run(out) else ""
        print(f"interrupted{said}", file=sys.stderr)
        sys.exit(TERMINATED if received[:1] == [signal.SIGTERM] else INTERRUPTED)
    except FedpaError as error:
        if not begun:
            raise
        raise FedpaError(f"{error}; once that is mended, {how_to_go_on(out)}") from None
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def how_to_go_on(out: Path) -> str:
    return f"`fedpa resume {shown(out)}` goes on"


def _how_far(out: Path) -> str:
    done = checkpoints.entries(out)
    return f"after round {done[-1]}" if done else "before the first round was done"
