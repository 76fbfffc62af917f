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
    """Build centralised training: SGD on examples put together, the reference of federated numbers.

    Args:
        local: The work of a round: one pass over a pool's examples, unless more epochs are given.
    Returns:
        The method, for `fedpa.fit` on `fedpa.data.pool_clients(…)`.
    Example:
        >>> import fedpa
        >>> method = fedpa.centralized(fedpa.LocalTraining(0.1, batch_size=10))
    """
    return fedavg(local, Server(sgd(1.0)))
