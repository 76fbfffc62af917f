"""FedAvg (Algorithms 1 and 2) in Reddi et al.'s form: Δ = θ₀ − θ_K, taken as a gradient.

FedAvgM, FedAdam, FedYogi and FedAdagrad are this with another server optimizer. In the paper's
terms it is posterior inference with Σ̂ = I and the last iterate for the mean.
"""

from fedpa.algorithms.client import client_update
from fedpa.algorithms.fedopt import Algorithm, ClientUpdate, fedopt
from fedpa.algorithms.local_training import LocalTraining, local_sampler, local_work
from fedpa.algorithms.methods import Method, describe
from fedpa.deltas.last_iterate import last_iterate
from fedpa.objectives.objective import Objective
from fedpa.server.update import Server, check_server


@describe
def fedavg(local: LocalTraining, server: Server) -> Method:
    """Build FedAvg: clients run local SGD and send Δ = θ₀ − θ_K (Algorithm 2).

    Args:
        local: The clients' work: optimizer, batch size, epochs or steps.
        server: The server's optimizer; `fedpa.server.adam` makes it FedAdam.
    Returns:
        The method, for `fedpa.fit`.
    Example:
        >>> import fedpa, optax
        >>> local = fedpa.LocalTraining(optax.sgd(0.1), batch_size=10, epochs=5)
        >>> method = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))
        >>> method.name, method.settings()["epochs"]
        ('fedavg', 5)
    """
    local_work(local)
    check_server(server)

    def build(objective: Objective) -> Algorithm:
        client = fedavg_client(objective, local, server)
        return fedopt(server, client, client_rate=local.schedule)

    return build


def fedavg_client(objective: Objective, local: LocalTraining, server: Server) -> ClientUpdate:
    """Algorithm 2; also what FedPA's clients run in burn-in rounds."""
    return client_update(
        lambda rate: local_sampler(objective, local, rate, average=False),
        last_iterate(),
        local_work(local).samples,
        server.weighting,
    )
