"""What is stored of a run, and over what it is averaged. Help shows it: no JAX here."""

import dataclasses

WINDOW = 10
"""Rounds of the running average, as in the paper."""


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """What is stored of a run, and where. None of it changes its numbers."""

    checkpoint_every: int | None = None
    """Rounds from one checkpoint to the next, at least 1 (default: one about every ten seconds,
    fewer where writing takes long)."""
    keep_checkpoints: int = 3
    """Number of latest checkpoints to keep, at least 1; the best is kept, too."""
    log: str | None = None
    """More places for records beside metrics.jsonl and TensorBoard: wandb, mlflow or wandb,mlflow
    (default: none)."""
