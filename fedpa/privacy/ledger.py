"""The ledger of a deployment: randomness that can't be repeated, and a count that can't be lost.

`config.toml` publishes a run's seed, so neither noise nor cohorts may follow from it. They come
from the operating system's entropy and are never stored. A round that is repeated after a crash
draws again, and is one more release: its line is on disk before its noise is drawn, so before a
model with that noise can leave the server.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpa.atomic_write import sync
from fedpa.errors import FedpaError, explain
from fedpa.privacy.accounting import Sampling
from fedpa.privacy.cohorts import draw_cohort
from fedpa.privacy.noise import draw_system_normals, draw_system_uniforms

LEDGER = "privacy.jsonl"
"""A line for each release."""


class Ledger:
    """The releases of a run, each a line of `privacy.jsonl`: `{"round": 7}`.

    Args:
        path: The file. What it contains is counted.
    Example:
        >>> from pathlib import Path
        >>> ledger = fedpa.privacy.Ledger(Path("privacy.jsonl"))
        >>> for t in (1, 2, 2):  # round 2 was repeated after a crash
        ...     ledger.record(t)
        >>> fedpa.privacy.Ledger(Path("privacy.jsonl")).count()
        3
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self, done: int = 0) -> int:
        """How many releases there were.

        A last line without its end, which a crash cut short, is of a round whose noise was not
        drawn. Other damage is refused: a lost line would be privacy that is spent and not counted.

        Args:
            done: Rounds that the run has: each had a release.
        Raises:
            FedpaError: The file can't be read, or is not what was written.
        """
        try:
            *lines, _ = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise FedpaError(f"{str(self.path)!r} can't be read: {explain(error)}") from None
        last = 0
        for number, text in enumerate(lines, start=1):
            t = _read_round(text)
            if t is None or t > last + 1:  # rounds are repeated, but none is left out
                raise self._damaged(f"line {number}", f"a round up to {last + 1}")
            last = max(last, t)
        if last < done:
            raise self._damaged("its end", f"round {done}, which the run has")
        return len(lines)

    def _damaged(self, where: str, expected: str) -> FedpaError:
        return FedpaError(
            f"{self.path}: {where}: must be the release of {expected}. The file is damaged, and "
            "the privacy that was spent can't be known: restore it, or start the run again in "
            "another directory"
        )

    def record(self, t: int) -> None:
        """Count one more release, of round t, and wait until it is on disk."""
        try:
            with self.path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # a line that a crash cut short
                file.write(f"{json.dumps({'round': t})}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            sync(self.path.parent)
        except OSError as error:
            raise FedpaError(f"{str(self.path)!r} can't be written: {explain(error)}") from None

    def draw_cohort(self, sampling: Sampling, ids: Sequence[str], size: int) -> list[str]:
        """Draw a cohort from the operating system's entropy."""
        return draw_cohort(sampling, ids, size, draw_system_uniforms(len(ids)))

    def draw_normals(self, like: Any) -> Any:
        """Draw noise from the operating system's entropy."""
        return draw_system_normals(like)


def _read_round(line: bytes) -> int | None:
    """Read the round of a line; None if it is not one."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or set(said) != {"round"}:
        return None
    t = said["round"]
    return t if type(t) is int and t >= 0 else None
