"""Centralised training, the reference of every federated number: SGD on examples put together.

It is FedAvg with a single client per round that holds the examples of as many clients as a
federated round visits (`fedpa.data.pool_clients`), and a server that takes its last iterate:
θ ← θ_K. A round makes one pass over them unless more epochs are asked for. ClientOpt is fresh each
round.
"""

from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.methods import Method, describe
from fedpa.server.optimizers import sgd
from fedpa.server.update import Server


@describe
def centralized(local: LocalTraining) -> Method:
    """Local training as the only training; for data from `fedpa.data.pool_clients`."""
    return fedavg(local, Server(sgd(1.0)))
