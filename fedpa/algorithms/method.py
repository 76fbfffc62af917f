"""Methods by name, for the command line: every algorithm file lists its own in `METHODS`."""

from collections.abc import Callable
from typing import NamedTuple

from fedpa.algorithms.algorithm import Method
from fedpa.algorithms.hyperparameters import Hyperparameters
from fedpa.discovery import defined


class NamedMethod(NamedTuple):
    label: str
    """As in the paper's tables, [M] standing for the number of local epochs."""
    summary: str
    build: Callable[[Hyperparameters], Method]
    adjust: Callable[[Hyperparameters], Hyperparameters] = lambda h: h
    """What the method itself fixes: FedAvg[1] has one epoch whatever else is said."""
    defaults: Callable[[Hyperparameters], Hyperparameters] = lambda h: h
    """A task's settings → what the method takes of them unless told otherwise."""
    samples: bool = False
    """Whether it draws posterior samples, by the sampler that is chosen."""
    pooled: bool = False
    """Whether a round's clients put their examples together: no federation at all."""


def methods() -> dict[str, NamedMethod]:
    """All methods of all files in this package; a new file needs no registration."""
    found: dict[str, NamedMethod] = {}
    for named in defined("fedpa.algorithms", "METHODS").values():
        found.update(named)
    return found


def labelled(name: str, h: Hyperparameters) -> str:
    """The method's label with sampler and local work: FedPA[5], FedPA-SGLD[3×10 steps]."""
    work = f"{h.epochs}"
    if h.steps_per_sample is not None:
        work = f"{h.samples}×{h.steps_per_sample} steps"
    method = methods()[name]
    named = f"-{h.sampler.upper()}" if method.samples and h.sampler != "iasg" else ""
    return method.label.replace("[M]", f"{named}[{work}]")
