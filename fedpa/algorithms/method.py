"""Methods by name, for the command line: every algorithm file lists its own in `METHODS`."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fedpa.algorithms.algorithm import Method
from fedpa.algorithms.hyperparameters import SAMPLING_FIELDS, Hyperparameters, applies
from fedpa.discovery import defined
from fedpa.errors import refuse


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
    begins_as_fedavg: bool = True
    """Whether, if it samples, the rounds of its burn-in are FedAvg's to the bit."""
    pooled: bool = False
    """Whether a round's clients put their examples together: no federation at all."""
    takes: tuple[str, ...] = ()
    """The settings of its own: fields of `Hyperparameters` that are None for other methods."""
    sends: str = "θ / Δ"
    """Down to a client / up from it."""
    keeps: str = "–"
    """State beside θ and the server optimizer's."""
    cost: str = "1"
    """Of a client's round, relative to FedAvg's."""


def methods() -> dict[str, NamedMethod]:
    """All methods of all files in this package; a new file needs no registration."""
    found: dict[str, NamedMethod] = {}
    for named in defined("fedpa.algorithms", "METHODS").values():
        found.update(named)
    return found


def own_fields() -> dict[str, list[str]]:
    """Each setting that only some methods have → those methods."""
    found: dict[str, list[str]] = {}
    for name, method in methods().items():
        for field in method.takes:
            found.setdefault(field, []).append(name)
    return found


def check_own(name: str, h: Hyperparameters) -> None:
    """Refuse a setting of other methods' than this one."""
    for field, takers in own_fields().items():
        value = getattr(h, field)
        if value is not None and name not in takers:
            raise refuse(
                field, value, f"does not apply to method {name}; only to {', '.join(takers)}"
            )


def reads_setting(name: str, h: Hyperparameters, field: str, values: Iterable[Any]) -> bool:
    """Whether a method with these settings reads one of them.

    values: what the setting has elsewhere. A method that sets it back to its default whatever is
        asked for does not read it.
    """
    method = methods()[name]
    takers = own_fields().get(field)
    if (takers is not None and name not in takers) or not applies(h, field):
        return False
    if not method.samples and field in SAMPLING_FIELDS:
        return False
    plain = getattr(Hyperparameters(), field)
    asked = [dataclasses.replace(h, **{field: value}) for value in values if value != plain]
    return all(getattr(method.adjust(other), field) != plain for other in asked)


def without_others(name: str, h: Hyperparameters, among: Iterable[str]) -> Hyperparameters:
    """The same settings for this method, without those that others of `among` alone have."""
    others: dict[str, Any] = {
        field: None
        for field, takers in own_fields().items()
        if name not in takers and set(takers) & set(among)
    }
    return dataclasses.replace(h, **others)


def labelled(name: str, h: Hyperparameters) -> str:
    """The method's label with sampler and local work: FedPA[5], FedPA-SGLD[3×10 steps]."""
    work = f"{h.epochs}"
    if h.steps_per_sample is not None:
        work = f"{h.samples}×{h.steps_per_sample} steps"
    method = methods()[name]
    named = "" if h.numerator in (None, "fedavg") else f" of {h.numerator}"
    named += f"-{h.sampler.upper()}" if method.samples and h.sampler != "iasg" else ""
    return method.label.replace("[M]", f"{named}[{work}]")
