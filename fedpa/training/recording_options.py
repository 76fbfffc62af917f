"""What may be said about how a run is recorded. None of it changes its numbers."""

import dataclasses

from fedpa.discovery import match_name
from fedpa.errors import check_integer
from fedpa.training.loggers.logger import check_loggers, loggers


@dataclasses.dataclass(frozen=True)
class RecordingOptions:
    """How a run is recorded."""

    checkpoint_every: int | None = None
    """Rounds from one checkpoint to the next; if not given, a checkpoint is written every ten
    seconds or so, less often where writing one takes long."""
    keep_checkpoints: int = 3
    """How many of the last checkpoints are kept, beside the best."""
    log: str | None = None
    """Where records go beside metrics.jsonl and TensorBoard: wandb, mlflow, or both with a comma
    between them."""


def check_recording(options: RecordingOptions) -> None:
    """Refuse what is out of range, and loggers that are not there."""
    if options.checkpoint_every is not None:
        check_integer("checkpoint_every", options.checkpoint_every, 1)
    check_integer("keep_checkpoints", options.keep_checkpoints, 1)
    check_loggers(logger_names(options))


def logger_names(options: RecordingOptions) -> list[str]:
    """TensorBoard always, then those asked for."""
    words = [word.strip() for word in (options.log or "").split(",") if word.strip()]
    asked = [match_name(word, loggers()) or word for word in words]
    return ["tensorboard", *(name for name in asked if name != "tensorboard")]
