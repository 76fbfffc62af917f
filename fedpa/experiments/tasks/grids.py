"""The grids that hyperparameters are chosen from: the paper's (appendix D), and smaller ones.

A laptop preset has the paper's grid where it makes sense in so few rounds: rates around its own,
fewer epochs, burn-in rounds that leave some for sampling.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fedpa.experiments.tasks.task import preset_named

Choices = Mapping[str, tuple[Any, ...]]
"""Field of `Hyperparameters` → its values."""


class Grid(NamedTuple):
    """Chosen in two steps, as in the paper."""

    training: Choices
    """On FedAvg: rates and local work."""
    sampling: Choices
    """Then, with those fixed, on FedPA: when sampling begins, and the shrinkage."""


_RHO = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_IMAGES = {
    "server_learning_rate": (0.01, 0.05, 0.1, 0.5, 1.0, 5.0),
    "client_learning_rate": (0.001, 0.005, 0.01, 0.05, 0.1),
}
_NEXT_WORD = {
    "server_learning_rate": (0.01, 0.05, 0.1, 0.5, 1.0),
    "client_learning_rate": (0.01, 0.05, 0.1),
}
_TAGS = {
    "server_learning_rate": (0.1, 0.5, 1.0, 5.0, 10.0),
    "client_learning_rate": (1.0, 5.0, 10.0, 50.0, 100.0),
}


def _grid(rates: Choices, epochs: tuple[int, ...], burn_in: tuple[int, ...]) -> Grid:
    return Grid({**rates, "epochs": epochs}, {"burn_in_rounds": burn_in, "rho": _RHO})


def _paper(rates: Choices) -> Grid:
    return _grid(rates, (2, 5, 10, 20), (100, 200, 400, 600, 800))


GRIDS: Mapping[str, Mapping[str, Grid]] = {
    "cifar100": {
        "laptop": _grid(
            {
                "server_learning_rate": (0.1, 0.5, 1.0),
                "client_learning_rate": (0.003, 0.01, 0.03, 0.1),
            },
            (1, 3, 5),
            (10, 20, 30, 40),
        ),
        "paper": _paper(_IMAGES),
    },
    "digits": {
        "laptop": Grid(
            {
                "server_learning_rate": (0.5, 1.0),
                "client_learning_rate": (0.02, 0.05, 0.1),
                "epochs": (2, 5),
            },
            {"burn_in_rounds": (10, 20, 40), "rho": (0.01, 0.1, 1.0)},
        ),
    },
    "emnist": {
        "laptop": _grid(
            {
                "server_learning_rate": (0.1, 0.5, 1.0),
                "client_learning_rate": (0.001, 0.005, 0.01, 0.05),
            },
            (2, 5),
            (10, 20, 30),
        ),
        "paper": _paper(_IMAGES),
    },
    "stackoverflow-lr": {
        "laptop": _grid(
            {
                "server_learning_rate": (0.5, 1.0, 5.0),
                "client_learning_rate": (5.0, 10.0, 50.0, 100.0),
            },
            (2, 5),
            (200, 400, 600),
        ),
        "paper": _paper(_TAGS),
    },
    "stackoverflow-nwp": {
        "laptop": _grid(
            {
                "server_learning_rate": (0.1, 0.5, 1.0),
                "client_learning_rate": (0.1, 0.3, 1.0),
            },
            (1, 2, 5),
            (30, 60, 90),
        ),
        "paper": _paper(_NEXT_WORD),
    },
}
"""Task → preset → grid."""


def grid_of(task: str, preset: str | None) -> Grid | None:
    """The grid of a task's preset, its first if none is named; None if it has none."""
    name, _ = preset_named(task, preset)
    return GRIDS.get(task, {}).get(name)
