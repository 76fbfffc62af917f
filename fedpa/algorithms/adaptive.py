"""FedAvg's family by its names: another server optimizer (Hsu et al. 2019; Reddi et al. 2021).

    FedAvgM, FedAdam, FedYogi, FedAdagrad   FedAvg with the server optimizer of that name
    AFO                                     an adaptive one, one local epoch, and client rates that
                                            decay exponentially: by 0.1 over 500 rounds (theirs fall
                                            in steps, once every 500)

In code: `fedavg(local, Server(server.adam(0.01)))`, and `schedule=` of `LocalTraining`.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from fedpa.algorithms.algorithm import Method
from fedpa.algorithms.fedavg import fedavg
from fedpa.algorithms.hyperparameters import Hyperparameters, local_training, one_epoch, server_side
from fedpa.algorithms.method import NamedMethod

Adaptive = Literal["adam", "yogi", "adagrad"]

RATES = {"adam": 0.01, "yogi": 0.01, "adagrad": 0.1}
"""Server rates where the task's own is another optimizer's: the middle of Reddi et al.'s best."""
MOMENTUM = 0.9
DECAY = "exponential:0.1:500"


def _build(h: Hyperparameters) -> Method:
    return fedavg(local_training(h), server_side(h))


def _with_momentum(h: Hyperparameters) -> Hyperparameters:
    return dataclasses.replace(
        h, server_optimizer="sgd", server_momentum=h.server_momentum or MOMENTUM
    )


def _momentums_rate(h: Hyperparameters) -> Hyperparameters:
    """Momentum β lengthens steps by 1/(1 − β): a rate that was chosen without is shortened by it.

    That of another optimizer means nothing here; FedAvg's own is 1.
    """
    if h.server_optimizer == "sgd" and h.server_momentum:
        return h
    rate = h.server_learning_rate if h.server_optimizer == "sgd" else 1.0
    return dataclasses.replace(h, server_learning_rate=round(rate * (1 - MOMENTUM), 12))


def _own_rate(optimizer: str) -> Callable[[Hyperparameters], Hyperparameters]:
    """A rate of this optimizer's, unless the task's is one."""

    def defaults(h: Hyperparameters) -> Hyperparameters:
        if h.server_optimizer == optimizer:
            return h
        return dataclasses.replace(h, server_learning_rate=RATES[optimizer], server_momentum=0.0)

    return defaults


def _with_optimizer(optimizer: Adaptive) -> Callable[[Hyperparameters], Hyperparameters]:
    return lambda h: dataclasses.replace(h, server_optimizer=optimizer)


def _decaying(h: Hyperparameters) -> Hyperparameters:
    """The server's optimizer if it is adaptive, else Adam; the client's schedule if it has one."""
    if h.server_optimizer == "sgd":
        h = dataclasses.replace(h, server_optimizer="adam")
    if h.client_schedule == "constant":
        h = dataclasses.replace(h, client_schedule=DECAY)
    return h


def _afo_defaults(h: Hyperparameters) -> Hyperparameters:
    h = one_epoch(h)
    return _own_rate("adam")(h) if h.server_optimizer == "sgd" else h


def _named(label: str, optimizer: Adaptive) -> NamedMethod:
    return NamedMethod(
        f"{label}[M]",
        f"FedAvg with {optimizer.capitalize()} on the server",
        _build,
        _with_optimizer(optimizer),
        _own_rate(optimizer),
    )


METHODS = {
    "fedavgm": NamedMethod(
        "FedAvgM[M]",
        "FedAvg with momentum on the server",
        _build,
        _with_momentum,
        _momentums_rate,
    ),
    "fedadam": _named("FedAdam", "adam"),
    "fedyogi": _named("FedYogi", "yogi"),
    "fedadagrad": _named("FedAdagrad", "adagrad"),
    "afo": NamedMethod(
        "AFO[M]",
        "adaptive server optimizer, decaying client rates, one epoch",
        _build,
        _decaying,
        _afo_defaults,
        cost="1/M",
    ),
}
