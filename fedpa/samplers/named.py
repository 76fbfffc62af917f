"""Samplers by name, for the command line: every sampler's file lists its own as `SAMPLER`."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import NamedTuple

from fedpa.errors import refuse
from fedpa.objectives.objective import Objective
from fedpa.samplers.minibatch_chain import Window
from fedpa.samplers.sampler import Sampler
from fedpa.samplers.temperature import Rate


class SamplerOptions(NamedTuple):
    """A sampler's settings as plain values; None stands for the sampler's own default."""

    learning_rate: Rate
    batch_size: int
    window: Window
    order: str
    temperature: float | None = None
    friction: float | None = None
    integration_steps: int | None = None
    max_doublings: int | None = None
    target_acceptance: float | None = None

    def given(self, *names: str) -> dict[str, float | int]:
        """Those of the named settings that are not None, as keyword arguments."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class NamedSampler(NamedTuple):
    summary: str
    build: Callable[[Objective, SamplerOptions], Sampler] | None
    """None: IASG, which is local training itself."""
    takes: tuple[str, ...] = ()
    """The settings of its own that apply to it."""
    minibatches: bool = True
    """False: every step is over all of the client's data."""


def samplers() -> dict[str, NamedSampler]:
    """All samplers of all files in this package that have one for the command line."""
    package = importlib.import_module("fedpa.samplers")
    found: dict[str, NamedSampler] = {}
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        loaded = importlib.import_module(f"fedpa.samplers.{name}")
        if "SAMPLER" in vars(loaded):
            found[name.replace("_", "-")] = loaded.SAMPLER
    return found


def sampler_named(name: str) -> NamedSampler:
    known = samplers()
    if name not in known:
        raise refuse("sampler", name, f"unknown sampler; choose from {', '.join(known)}")
    return known[name]
