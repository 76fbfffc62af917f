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

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of Ctrl-C and of SIGTERM, by which schedulers announce that they will kill."""


@contextlib.contextmanager
def resumable(out: Path, command: str | None = None) -> Iterator[None]:
    """Ctrl-C and SIGTERM save the last round, say how to go on, and end the command.

    command: what goes on with it; `fedpa resume DIR` if not given.
    """
    code = INTERRUPTED

    def terminated(*_: Any) -> None:
        nonlocal code
        code = TERMINATED
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except KeyboardInterrupt:  # by now the run has saved what it has
        print(f"interrupted {_how_far(out)}: {how_to_go_on(out, command)}", file=sys.stderr)
        sys.exit(code)
    except FedpaError as error:
        if not (out / run_directory.CONFIG).is_file():
            raise
        raise FedpaError(f"{error}\n{how_to_go_on(out, command)}, once that is mended") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def how_to_go_on(out: Path, command: str | None = None) -> str:
    return f"`{command or f'fedpa resume {shown(out)}'}` goes on"


def _how_far(out: Path) -> str:
    done = checkpoints.entries(out)
    return f"after round {done[-1]}" if done else "before the first round was done"
