"""Federated learning as posterior inference: Federated Posterior Averaging (FedPA) on JAX."""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpa import (
        algorithms,
        data,
        deltas,
        engines,
        objectives,
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
    from fedpa.training.fit import fit

_NAMES = {
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
    "fedpa.server": ("Server",),
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
}
"""Where what stands here is defined. It is imported when it is asked for: a node that trains with
another library (`fedpa.numpy_client`) has no JAX."""
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__version__ = version("fedpa")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


__all__ = [
    "Best",
    "FedpaError",
    "Fit",
    "LocalTraining",
    "Objective",
    "RecordingOptions",
    "Remembering",
    "Server",
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
    "exact_posterior",
    "export",
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
    "mime",
    "mime_lite",
    "objectives",
    "over_examples",
    "per_example",
    "posterior_delta",
    "resume",
    "samplers",
    "scaffold",
    "server",
    "stop_at",
    "table_input",
    "train",
    "training",
]
