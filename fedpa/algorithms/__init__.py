"""Federated algorithms, one file each, as assemblies of samplers, deltas and servers."""

from fedpa.algorithms.centralized import centralized
from fedpa.algorithms.exact_posterior import exact_posterior
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.fedexp import fedexp
from fedpa.algorithms.fedopt import Algorithm, ClientResult
from fedpa.algorithms.fedpa import fedpa
from fedpa.algorithms.fedprox import fedprox
from fedpa.algorithms.global_precision import global_precision
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.mb_sgd import mb_sgd
from fedpa.algorithms.mean import mean
from fedpa.algorithms.methods import Method
from fedpa.algorithms.mime import mime, mime_lite, moments, momentum
from fedpa.algorithms.scaffold import scaffold

__all__ = [
    "Algorithm",
    "ClientResult",
    "LocalTraining",
    "Method",
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
    "moments",
    "momentum",
    "scaffold",
]
