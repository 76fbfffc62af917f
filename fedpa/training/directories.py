"""Beginning in a directory, and going on in one: what is done there, by whom, in which order."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedpa.engines.distributed import from_first, is_first
from fedpa.errors import FedpaError
from fedpa.training import checkpoints, run_directory
from fedpa.training.conducting import Place, Training, conduct, given_back, started
from fedpa.training.lock import locked
from fedpa.training.loop import Fit
from fedpa.training.recording import Made, admitted, begin, found
from fedpa.training.recording_options import RecordingOptions
from fedpa.training.saving import best_round
from fedpa.training.snapshot import Snapshot


@contextlib.contextmanager
def new_directory(out: Path, overwrite: bool) -> Iterator[None]:
    """Hold the directory, with nothing of an earlier run in it."""
    run_directory.check_free(out, overwrite)
    with run_directory.writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        run_directory.check_free(out, overwrite)  # somebody may have been there until now
        run_directory.clear(out)
        yield


def branched(training: Training, source: Path, out: Path, made: Made) -> Snapshot:
    """Where another run ended, as this run's past, with a checkpoint of its own."""
    start = started(training, source, checkpoints.last(source))
    if start is None:
        raise FedpaError(f"{str(source)!r} has no checkpoint to go on from")
    best = best_round(start.memory)
    if best in checkpoints.entries(source) and best != start.round:
        with run_directory.writing(out):  # whole when it has its name
            place = checkpoints.entry(out, best)
            part = place.with_name(f"{best}.part")
            shutil.rmtree(part, ignore_errors=True)  # of an attempt that was cut
            shutil.copytree(checkpoints.entry(source, best), part)
            part.rename(place)
    checkpoints.save(out, start, made.settings)
    return start


def go_on(
    training: Training,
    out: Path,
    made: Made,
    options: RecordingOptions,
    about: Mapping[str, Any],
    anyway: bool = False,
    initial: Any = None,
    branch: Path | None = None,
) -> Fit:
    """Go on with the run that lies there; one that is finished is given back, and left as it is.

    branch: where it begins if it has no checkpoint of its own yet.
    """
    over = from_first(lambda: run_directory.is_finished(out, training.rounds))
    if over:
        # Nothing will be computed, so it does not matter by which versions.
        start = started(training, out, found(out, made, anyway=True))
        whole = given_back(training, out, start)
        if whole is not None:
            return whole
    with contextlib.ExitStack() as stack:
        if is_first():
            if not os.access(out, os.W_OK | os.X_OK):
                raise FedpaError(f"{str(out)!r} is read-only: copy it and resume the copy")
            stack.enter_context(locked(out))
        start = started(training, out, found(out, made, anyway))
        if start is None and run_directory.read_summary(out) is not None:
            raise FedpaError(
                f"{str(out)!r} is finished and its checkpoints are gone: there is nothing to go on "
                "from"
            )
        if start is None and branch is not None and is_first():
            start = branched(training, branch, out, made)
        made = admitted(out, made, start)
        if is_first():
            begin(out, made, start, initial)
        return conduct(training, Place(out, made, options, start, about))
