"""Federated learning as posterior inference: Federated Posterior Averaging (FedPA) on JAX."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

if TYPE_CHECKING:
    from fedpa import (
        algorithms,
        data,
        deltas,
        engines,
        metrics,
        objectives,
        precisions,
        samplers,
        server,
        training,
    )
    from fedpa.algorithms import (
        LocalTraining,
        centralized,
        exact_posterior,
        fedavg,
        fedexp,
        fedpa,
        fedprox,
        global_precision,
        mb_sgd,
        mean,
        mime,
        mime_lite,
        scaffold,
    )
    from fedpa.algorithms.fedopt import fed_round
    from fedpa.deltas import posterior_delta
    from fedpa.engines import configure
    from fedpa.errors import FedpaError
    from fedpa.objectives import (
        Objective,
        convolution_input,
        layer_input,
        over_examples,
        per_example,
        table_input,
    )
    from fedpa.precisions import Precision
    from fedpa.server import Server
    from fedpa.training import (
        Best,
        Fit,
        RecordingOptions,
        Remembering,
        Stop,
        early_stopping,
        export,
        load,
        max_minutes,
        resume,
        stop_at,
        train,
    )
    from fedpa.training.estimate import Estimate, estimate
    from fedpa.training.fit import fit
    from fedpa.training.simulate import Simulation, simulate

make_lazy(
    __name__,
    {
        "fedpa.algorithms": (
            "LocalTraining",
            "centralized",
            "exact_posterior",
            "fedavg",
            "fedexp",
            "fedpa",
            "fedprox",
            "global_precision",
            "mb_sgd",
            "mean",
            "mime",
            "mime_lite",
            "scaffold",
        ),
        "fedpa.algorithms.fedopt": ("fed_round",),
        "fedpa.deltas": ("posterior_delta",),
        "fedpa.engines": ("configure",),
        "fedpa.errors": ("FedpaError",),
        "fedpa.objectives": (
            "Objective",
            "convolution_input",
            "layer_input",
            "over_examples",
            "per_example",
            "table_input",
        ),
        "fedpa.precisions": ("Precision",),
        "fedpa.server": ("Server",),
        "fedpa.training.estimate": ("Estimate", "estimate"),
        "fedpa.training.simulate": ("Simulation", "simulate"),
        "fedpa.training": (
            "Best",
            "Fit",
            "RecordingOptions",
            "Remembering",
            "Stop",
            "early_stopping",
            "export",
            "fit",
            "load",
            "max_minutes",
            "resume",
            "stop_at",
            "train",
        ),
    },
)

__version__ = version("fedpa")

__all__ = [
    "Best",
    "Estimate",
    "FedpaError",
    "Fit",
    "LocalTraining",
    "Objective",
    "Precision",
    "RecordingOptions",
    "Remembering",
    "Server",
    "Simulation",
    "Stop",
    "__version__",
    "algorithms",
    "centralized",
    "configure",
    "convolution_input",
    "data",
    "deltas",
    "early_stopping",
    "engines",
    "estimate",
    "exact_posterior",
    "export",
    "fed_round",
    "fedavg",
    "fedexp",
    "fedpa",
    "fedprox",
    "fit",
    "global_precision",
    "layer_input",
    "load",
    "max_minutes",
    "mb_sgd",
    "mean",
    "metrics",
    "mime",
    "mime_lite",
    "objectives",
    "over_examples",
    "per_example",
    "posterior_delta",
    "precisions",
    "resume",
    "samplers",
    "scaffold",
    "server",
    "simulate",
    "stop_at",
    "table_input",
    "train",
    "training",
]
