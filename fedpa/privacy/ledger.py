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

    def count(self) -> int:
        """How many releases there were."""
        try:
            return len(self.path.read_bytes().splitlines())
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise FedpaError(f"{str(self.path)!r} can't be read: {explain(error)}") from None

    def record(self, t: int) -> None:
        """Count one more release, of round t, and wait until it is on disk.

        A line that a crash cut short is of a round whose noise was not drawn.
        """
        try:
            with self.path.open("ab") as file:
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
