"""TensorBoard's event files, in `tensorboard/`.

Written here and now rather than by `tensorboardX.SummaryWriter`: that has a thread which dies when
the disk is full, and a queue in front of it which then fills up and never lets training go on.
"""

import contextlib
import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpa.training.loggers.logger import (
    Logger,
    Write,
    flatten,
    forgive,
    import_library,
    recall,
    remember,
    select_new,
)

NAME, DIRECTORY = "tensorboard", "tensorboard"
PREFIX, SUFFIX = "events.out.tfevents.", ".fedpa"
"""TensorBoard looks for the first, the second tells which files are ours."""


def _check() -> None:
    import_library("tensorboardX", "fedpa")


@contextlib.contextmanager
def _opened(
    out: Path, config: Mapping[str, Any], past: Sequence[Mapping[str, Any]]
) -> Iterator[Write]:
    """One file with each round once: the run may have been killed and resumed at an earlier round.

    Time is the start of the run and the seconds of its rounds since, whatever the clock says: the
    same file comes out of a run whether it was resumed or not.
    """
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import text

    now: float = recall(out, NAME).get("start", time.time())
    remember(out, NAME, {"start": now})
    directory = out / DIRECTORY
    directory.mkdir(exist_ok=True)
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        path.unlink()
    told: dict[str, int] = {}  # the last record of the past may know what comes after it

    with (directory / f"{PREFIX}{time.time():010.0f}{SUFFIX}").open("wb") as file:

        def event(**content: Any) -> None:
            file.write(_framed(Event(wall_time=now, **content).SerializeToString()))

        def write(record: Mapping[str, Any], flush: bool = True) -> None:
            nonlocal now
            seconds = record.get("seconds", 0.0)
            now += seconds if math.isfinite(seconds) else 0.0
            values = select_new(record, told)
            told.update(dict.fromkeys(values, record["round"]))
            summary = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
            event(step=record["round"], summary=Summary(value=summary))
            if flush:
                file.flush()  # to the system, not to the disk: that would be a wait per round

        event(file_version="brain.Event:2")
        event(summary=text("configuration", _table(config)))
        for record in past:
            write(record, flush=False)
        file.flush()
        yield write


def _framed(message: bytes) -> bytes:
    """A record of a TFRecord file: length, its checksum, the message, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(message))
    sums = [struct.pack("<I", masked_crc32c(part)) for part in (length, message)]
    return length + sums[0] + message + sums[1]


def _table(config: Mapping[str, Any]) -> str:
    """The configuration in Markdown, which TensorBoard shows."""
    texts = {name: " ".join(str(value).split()) for name, value in flatten(config).items()}
    rows = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in texts.items()]
    return "\n".join(["| setting | value |", "| --- | --- |", *rows])


LOGGER = Logger(
    "event files in the run's directory, for tensorboard --logdir", _check, forgive(NAME, _opened)
)
