"""Federated algorithms, one file each, as assemblies of samplers, deltas and servers."""

from fedpa.algorithms.centralized import centralized
from fedpa.algorithms.client import client_update
from fedpa.algorithms.ep import ep, pvi
from fedpa.algorithms.exact_posterior import exact_posterior
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.fedexp import fedexp
from fedpa.algorithms.fedopt import (
    Algorithm,
    ClientResult,
    Cohort,
    Reading,
    Switch,
    fed_round,
    fedopt,
)
from fedpa.algorithms.fedpa import fedpa
from fedpa.algorithms.fedprox import fedprox
from fedpa.algorithms.global_precision import global_precision
from fedpa.algorithms.laplace import laplace
from fedpa.algorithms.local_precision import local_precision
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.mb_sgd import mb_sgd
from fedpa.algorithms.mean_control import mean_control
from fedpa.algorithms.methods import Described, Method, describe
from fedpa.algorithms.mime import Base, mime, mime_lite, moments, momentum
from fedpa.algorithms.plateau import Plateau
from fedpa.algorithms.private import private
from fedpa.algorithms.product import product
from fedpa.algorithms.scaffold import scaffold
from fedpa.algorithms.sep import sep
from fedpa.algorithms.switch import switch_at_plateau

__all__ = [
    "Algorithm",
    "Base",
    "ClientResult",
    "Cohort",
    "Described",
    "LocalTraining",
    "Method",
    "Plateau",
    "Reading",
    "Switch",
    "centralized",
    "client_update",
    "describe",
    "ep",
    "exact_posterior",
    "fed_round",
    "fedavg",
    "fedexp",
    "fedopt",
    "fedpa",
    "fedprox",
    "global_precision",
    "laplace",
    "local_precision",
    "mb_sgd",
    "mean_control",
    "mime",
    "mime_lite",
    "moments",
    "momentum",
    "private",
    "product",
    "pvi",
    "scaffold",
    "sep",
    "switch_at_plateau",
]
