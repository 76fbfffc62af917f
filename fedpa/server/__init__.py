"""The server: weighting, aggregation, optimizers, schedules (Algorithm 1, lines 8 and 9)."""

from fedpa.server import averaging, schedules
from fedpa.server.aggregation import (
    Aggregate,
    Aggregation,
    Weighting,
    add_all,
    client_weight,
    weighted_mean,
)
from fedpa.server.bucketing import bucketing
from fedpa.server.centered_clipping import centered_clipping
from fedpa.server.clipped_mean import clipped_mean
from fedpa.server.geometric_median import geometric_median
from fedpa.server.keep_results import keep_results
from fedpa.server.median import median
from fedpa.server.multi_krum import multi_krum
from fedpa.server.optimizers import adagrad, adam, sgd, yogi
from fedpa.server.parse_aggregation import parse_aggregation
from fedpa.server.schedules import Schedule
from fedpa.server.trimmed_mean import trimmed_mean
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
    "add_all",
    "averaging",
    "bucketing",
    "centered_clipping",
    "client_weight",
    "clipped_mean",
    "geometric_median",
    "keep_results",
    "median",
    "multi_krum",
    "parse_aggregation",
    "schedules",
    "sgd",
    "trimmed_mean",
    "weighted_mean",
    "yogi",
]
