"""The round loop, callbacks, checkpoints, run directories."""

from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa.training.callbacks import (
        Best,
        Callback,
        Event,
        Remembering,
        Stop,
        early_stopping,
        evaluation,
        max_minutes,
        stop_at,
    )
    from fedpa.training.fit import fit
    from fedpa.training.history import History
    from fedpa.training.loading import Checkpoint, Run, export, load, load_checkpoint, resume
    from fedpa.training.loop import Fit, train
    from fedpa.training.run import RecordingOptions

make_lazy(
    __name__,
    {
        "fedpa.training.callbacks": (
            "Best",
            "Callback",
            "Event",
            "Remembering",
            "Stop",
            "early_stopping",
            "evaluation",
            "max_minutes",
            "stop_at",
        ),
        "fedpa.training.fit": ("fit",),
        "fedpa.training.history": ("History",),
        "fedpa.training.loading": (
            "Checkpoint",
            "Run",
            "export",
            "load",
            "load_checkpoint",
            "resume",
        ),
        "fedpa.training.loop": ("Fit", "train"),
        "fedpa.training.run": ("RecordingOptions",),
    },
)

__all__ = [
    "Best",
    "Callback",
    "Checkpoint",
    "Event",
    "Fit",
    "History",
    "RecordingOptions",
    "Remembering",
    "Run",
    "Stop",
    "early_stopping",
    "evaluation",
    "export",
    "fit",
    "load",
    "load_checkpoint",
    "max_minutes",
    "resume",
    "stop_at",
    "train",
]
