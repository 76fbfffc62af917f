"""The round loop, callbacks and run directories."""

from fedpa.training.callbacks import Callback, Event, Stop
from fedpa.training.config import RunConfig
from fedpa.training.evaluation import evaluation
from fedpa.training.fit import fit
from fedpa.training.loop import Fit, train
from fedpa.training.run import run
from fedpa.training.run_directory import Run, load, metrics_file

__all__ = [
    "Callback",
    "Event",
    "Fit",
    "Run",
    "RunConfig",
    "Stop",
    "evaluation",
    "fit",
    "load",
    "metrics_file",
    "run",
    "train",
]
