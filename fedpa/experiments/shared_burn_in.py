"""Rounds that several methods of a comparison have in common, computed once.

FedPA and its controls begin as FedAvg: with one seed and the same settings their first rounds are
the same numbers, bit for bit. One run makes them, the others go on from its last checkpoint.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import TypeVar

from fedpa.experiments.config import RunConfig, resolve
from fedpa.experiments.methods import METHODS, drop_others

K = TypeVar("K", bound=Hashable)
BEGINS_AS = "fedavg"


def burn_in(config: RunConfig) -> RunConfig | None:
    """The run that is this one's burn-in; None if it has none, or nothing after it."""
    h = config.hyperparameters
    method = METHODS[config.method]
    if not (method.samples and method.begins_as_fedavg and 0 < h.burn_in_rounds < config.rounds):
        return None
    return as_burn_in(config, h.burn_in_rounds)


def is_all_burn_in(config: RunConfig) -> bool:
    """Whether the method draws samples, but none of its rounds would."""
    burn_in_rounds = config.hyperparameters.burn_in_rounds
    return METHODS[config.method].samples and burn_in_rounds >= config.rounds


def as_burn_in(config: RunConfig, rounds: int) -> RunConfig:
    """`rounds` rounds of FedAvg with these settings."""
    h = drop_others(BEGINS_AS, config.hyperparameters, among=[config.method])
    return resolve(dataclasses.replace(config, method=BEGINS_AS, rounds=rounds, hyperparameters=h))


def find_shared_burn_in(configs: Mapping[K, RunConfig]) -> dict[K, RunConfig]:
    """For each run that has company in its first rounds, the run that makes them for all."""
    wanted = {key: burn_in(config) for key, config in configs.items()}
    lengths = {found.rounds for found in wanted.values() if found is not None}
    for key, config in configs.items():
        if config.method == BEGINS_AS and len(lengths) == 1:
            (rounds,) = lengths
            if rounds < config.rounds:
                wanted[key] = as_burn_in(config, rounds)
    there = [found for found in wanted.values() if found is not None]
    return {
        key: found for key, found in wanted.items() if found is not None and there.count(found) > 1
    }
