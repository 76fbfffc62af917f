"""Federated learning as posterior inference: Federated Posterior Averaging (FedPA) on JAX."""

from importlib.metadata import version

from fedpa import algorithms, data, deltas, engines, objectives, samplers, server, tasks, training
from fedpa.algorithms import (
    LocalTraining,
    centralized,
    exact_posterior,
    fedavg,
    fedpa,
    mb_sgd,
    mean,
)
from fedpa.deltas import posterior_delta
from fedpa.errors import FedpaError
from fedpa.objectives import Objective, per_example
from fedpa.server import Server
from fedpa.training import Fit, Stop, fit, load, train

__version__ = version("fedpa")

__all__ = [
    "FedpaError",
    "Fit",
    "LocalTraining",
    "Objective",
    "Server",
    "Stop",
    "__version__",
    "algorithms",
    "centralized",
    "data",
    "deltas",
    "engines",
    "exact_posterior",
    "fedavg",
    "fedpa",
    "fit",
    "load",
    "mb_sgd",
    "mean",
    "objectives",
    "per_example",
    "posterior_delta",
    "samplers",
    "server",
    "tasks",
    "train",
    "training",
]
