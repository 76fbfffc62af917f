"""The server: weighting, aggregation, optimizers, schedules (Algorithm 1, lines 8 and 9)."""

from fedpa.server import averaging, schedules
from fedpa.server.aggregation import (
    Aggregate,
    Aggregation,
    Weighting,
    client_weight,
    weighted_mean,
)
from fedpa.server.optimizers import adagrad, adam, sgd, yogi
from fedpa.server.schedules import Schedule
from fedpa.server.update import Server, ServerInfo, ServerState

__all__ = [
    "Aggregate",
    "Aggregation",
    "Schedule",
    "Server",
    "ServerInfo",
    "ServerState",
    "Weighting",
    "adagrad",
    "adam",
    "averaging",
    "client_weight",
    "schedules",
    "sgd",
    "weighted_mean",
    "yogi",
]
