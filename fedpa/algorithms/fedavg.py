"""FedAvg (Algorithms 1 and 2) in Reddi et al.'s form: Δ = θ₀ − θ_K, taken as a gradient.

FedAvgM, FedAdam, FedYogi and FedAdagrad are this with another server optimizer. In the paper's
terms it is posterior inference with Σ̂ = I and the last iterate for the mean.
"""

from fedpa.algorithms.algorithm import BURN_IN, Algorithm, ClientUpdate, Method, describe
from fedpa.algorithms.client_update import client_update
from fedpa.algorithms.generalized import generalized
from fedpa.algorithms.hyperparameters import Hyperparameters, local_training, one_epoch, server_side
from fedpa.algorithms.local_training import LocalTraining, local_sampler, local_work
from fedpa.algorithms.method import NamedMethod
from fedpa.deltas.last_iterate import last_iterate
from fedpa.objectives.objective import Objective
from fedpa.server.update import Server, check_server


@describe
def fedavg(local: LocalTraining, server: Server) -> Method:
    """Local SGD for all the epochs (or steps) of `local`, the last iterate sent."""
    local_work(local)
    check_server(server)

    def build(objective: Objective) -> Algorithm:
        clients = {BURN_IN: fedavg_client(objective, local, server)}
        return generalized(server, clients, lambda _: BURN_IN, local.schedule)

    return build


def fedavg_client(objective: Objective, local: LocalTraining, server: Server) -> ClientUpdate:
    """Algorithm 2; also what FedPA's clients run in burn-in rounds."""
    return client_update(
        lambda rate: local_sampler(objective, local, rate, average=False),
        last_iterate(),
        local_work(local).samples,
        server.weighting,
    )


def _fedavg(h: Hyperparameters) -> Method:
    return fedavg(local_training(h), server_side(h))


METHODS = {
    "fedavg-1": NamedMethod(
        "FedAvg[1]", "FedAvg with one local epoch", _fedavg, one_epoch, cost="1/M"
    ),
    "fedavg": NamedMethod("FedAvg[M]", "FedAvg: Δ = θ₀ − last of M epochs' iterates", _fedavg),
}
