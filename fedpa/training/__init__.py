"""The round loop, callbacks, checkpoints, run directories."""

from fedpa.training.callbacks import Callback, Event, Remembering, Stop, evaluation
from fedpa.training.fit import fit
from fedpa.training.history import History
from fedpa.training.loading import Run, export, load, resume
from fedpa.training.loop import Fit, train
from fedpa.training.recording import RecordingOptions
from fedpa.training.stopping import Best, early_stopping, max_minutes, stop_at

__all__ = [
    "Best",
    "Callback",
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
    "max_minutes",
    "resume",
    "stop_at",
    "train",
]
