"""Samplers by name, for the command line: every sampler's file lists its own as `SAMPLER`."""

from collections.abc import Callable
from typing import NamedTuple

from fedpa.discovery import defined
from fedpa.errors import refuse
from fedpa.objectives.objective import Objective
from fedpa.samplers.minibatch_chain import Window
from fedpa.samplers.sampler import Sampler
from fedpa.samplers.temperature import Rate, Temperature


class SamplerOptions(NamedTuple):
    """A sampler's settings as plain values; None stands for the sampler's own default."""

    learning_rate: Rate
    batch_size: int
    window: Window
    order: str
    temperature: Temperature | None = None
    friction: float | None = None
    integration_steps: int | None = None
    max_doublings: int | None = None
    target_acceptance: float | None = None


class NamedSampler(NamedTuple):
    summary: str
    build: Callable[[Objective, SamplerOptions], Sampler] | None
    """None: IASG, which is local training itself."""
    takes: tuple[str, ...] = ()
    """The settings of its own that apply to it."""
    minibatches: bool = True
    """False: every step is over all of the client's data."""


def named(
    summary: str, sampler: Callable[..., Sampler], takes: tuple[str, ...], minibatches: bool = True
) -> NamedSampler:
    """The entry of a sampler whose settings are called as `SamplerOptions` calls them."""

    def build(objective: Objective, o: SamplerOptions) -> Sampler:
        steps = {"batch_size": o.batch_size, "order": o.order} if minibatches else {}
        own = {name: getattr(o, name) for name in takes if getattr(o, name) is not None}
        return sampler(objective, o.learning_rate, window=o.window, **steps, **own)

    return NamedSampler(summary, build, takes, minibatches)


def samplers() -> dict[str, NamedSampler]:
    """All samplers of all files in this package that have one for the command line."""
    return defined("fedpa.samplers", "SAMPLER")


def sampler_named(name: str) -> NamedSampler:
    known = samplers()
    if name not in known:
        raise refuse("sampler", name, f"unknown sampler; choose from {', '.join(known)}")
    return known[name]
