"""Federated learning as posterior inference: Federated Posterior Averaging (FedPA) on JAX."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fedpa.lazy import make_lazy

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
    from fedpa.experiments.comparison.own_model import compare
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


def _check_installed(home: str) -> None:
    """Say what installs the laboratory's packages, if one is missing."""
    if home.startswith("fedpa.experiments"):
        from fedpa.__main__ import EXTRA

        missing = [name for name in EXTRA if find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(
                f"{missing[0]} is not installed: pip install 'fedpa[experiments]' installs it",
                name=missing[0],
            )


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
        "fedpa.deltas": ("posterior_delta",),
        "fedpa.engines": ("configure",),
        "fedpa.errors": ("FedpaError",),
        "fedpa.experiments.comparison.own_model": ("compare",),
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
    },
    _check_installed,
)

__version__ = version("fedpa")

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
    "compare",
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
