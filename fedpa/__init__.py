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
        metrics,
        objectives,
        posterior,
        precisions,
        privacy,
        samplers,
        server,
        sites,
        training,
    )
    from fedpa.algorithms import (
        Algorithm,
        LocalTraining,
        Method,
        Plateau,
        centralized,
        client_update,
        exact_posterior,
        fed_round,
        fedavg,
        fedexp,
        fedopt,
        fedpa,
        fedprox,
        global_precision,
        local_precision,
        mb_sgd,
        mean_control,
        mime,
        mime_lite,
        private,
        scaffold,
        switch_at_plateau,
    )
    from fedpa.deltas import Delta, posterior_delta
    from fedpa.engines import Engine, configure
    from fedpa.errors import FedpaError
    from fedpa.experiments.comparison.own_model import compare
    from fedpa.objectives import (
        Objective,
        convolution_input,
        layer_input,
        layer_output,
        normal_prior,
        over_examples,
        per_example,
        table_input,
    )
    from fedpa.posterior.files import load_posterior
    from fedpa.posterior.infer import infer
    from fedpa.posterior.laplace import laplace_posterior
    from fedpa.posterior.pooled import compare_with_pooled
    from fedpa.posterior.posterior import Posterior
    from fedpa.precisions import Precision
    from fedpa.samplers import Sampler
    from fedpa.server import Aggregation, Server
    from fedpa.training import (
        Best,
        Fit,
        RecordingOptions,
        Remembering,
        Stop,
        early_stopping,
        export,
        load,
        load_checkpoint,
        max_minutes,
        resume,
        stop_at,
        train,
    )
    from fedpa.training.estimate import Estimate, estimate
    from fedpa.training.fit import fit
    from fedpa.training.simulate import Simulation, simulate


def _check_installed(home: str) -> None:
    """Raise an error that names what to install if a package of the laboratory is missing."""
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
            "Algorithm",
            "LocalTraining",
            "Method",
            "Plateau",
            "centralized",
            "client_update",
            "exact_posterior",
            "fed_round",
            "fedavg",
            "fedexp",
            "fedopt",
            "fedpa",
            "fedprox",
            "global_precision",
            "local_precision",
            "mb_sgd",
            "mean_control",
            "mime",
            "mime_lite",
            "private",
            "scaffold",
            "switch_at_plateau",
        ),
        "fedpa.deltas": ("Delta", "posterior_delta"),
        "fedpa.engines": ("Engine", "configure"),
        "fedpa.errors": ("FedpaError",),
        "fedpa.experiments.comparison.own_model": ("compare",),
        "fedpa.objectives": (
            "Objective",
            "convolution_input",
            "layer_input",
            "normal_prior",
            "layer_output",
            "over_examples",
            "per_example",
            "table_input",
        ),
        "fedpa.posterior.files": ("load_posterior",),
        "fedpa.posterior.infer": ("infer",),
        "fedpa.posterior.laplace": ("laplace_posterior",),
        "fedpa.posterior.pooled": ("compare_with_pooled",),
        "fedpa.posterior.posterior": ("Posterior",),
        "fedpa.precisions": ("Precision",),
        "fedpa.samplers": ("Sampler",),
        "fedpa.server": ("Aggregation", "Server"),
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
            "load_checkpoint",
            "max_minutes",
            "resume",
            "stop_at",
            "train",
        ),
        "fedpa.training.estimate": ("Estimate", "estimate"),
        "fedpa.training.simulate": ("Simulation", "simulate"),
    },
    _check_installed,
)

__version__ = version("fedpa")

__all__ = [
    "Aggregation",
    "Algorithm",
    "Best",
    "Delta",
    "Engine",
    "Estimate",
    "FedpaError",
    "Fit",
    "LocalTraining",
    "Method",
    "Objective",
    "Plateau",
    "Posterior",
    "Precision",
    "RecordingOptions",
    "Remembering",
    "Sampler",
    "Server",
    "Simulation",
    "Stop",
    "__version__",
    "algorithms",
    "centralized",
    "client_update",
    "compare",
    "compare_with_pooled",
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
    "fedopt",
    "fedpa",
    "fedprox",
    "fit",
    "global_precision",
    "infer",
    "laplace_posterior",
    "layer_input",
    "layer_output",
    "load",
    "load_checkpoint",
    "load_posterior",
    "local_precision",
    "max_minutes",
    "mb_sgd",
    "mean_control",
    "metrics",
    "mime",
    "mime_lite",
    "normal_prior",
    "objectives",
    "over_examples",
    "per_example",
    "posterior",
    "posterior_delta",
    "precisions",
    "privacy",
    "private",
    "resume",
    "samplers",
    "scaffold",
    "server",
    "simulate",
    "sites",
    "stop_at",
    "switch_at_plateau",
    "table_input",
    "train",
    "training",
]
