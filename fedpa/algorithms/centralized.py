"""Centralised training, the reference of every federated number: SGD on examples put together.

It is FedAvg with a single client per round that holds the examples of as many clients as a
federated round visits (`fedpa.data.pooled`), and a server that takes its last iterate: θ ← θ_K.
A round makes one pass over them unless more epochs are asked for. ClientOpt is fresh each round.
"""

import dataclasses

from fedpa.algorithms.algorithm import Method, describe
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.hyperparameters import Hyperparameters, local_training, one_epoch
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.method import NamedMethod
from fedpa.server.optimizers import sgd
from fedpa.server.update import Server


@describe
def centralized(local: LocalTraining) -> Method:
    """Local training as the only training; for data from `fedpa.data.pooled`."""
    return fedavg(local, Server(sgd(1.0)))


def _without_server(h: Hyperparameters) -> Hyperparameters:
    """There is no server to set up: its fields say what happens."""
    return dataclasses.replace(
        h,
        server_optimizer="sgd",
        server_learning_rate=1.0,
        server_momentum=0.0,
        server_schedule="constant",
        iterate_averaging="none",
        burn_in_rounds=0,
    )


METHODS = {
    "centralized": NamedMethod(
        "centralized[M]",
        "no federation: SGD on a round's clients put together",
        lambda h: centralized(local_training(h)),
        _without_server,
        one_epoch,
        pooled=True,
        sends="–",
        cost="1/M",
    )
}
