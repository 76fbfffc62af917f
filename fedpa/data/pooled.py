"""A federation put together again: groups of clients, each group's examples as one."""

import functools
from typing import Any

import jax
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.errors import check_integer


def pooled(data: FederatedData, clients: int, seed: int) -> FederatedData:
    """Deal the clients to groups of `clients` at random; a group is one client, `pool-0`, … .

    Shuffled mini-batches of a group are close to shuffled mini-batches of everybody's examples
    where a group is large, and memory is that of a group, never of the population.
    """
    check_integer("clients", clients, 1)
    order = np.random.default_rng([seed, _POOLS]).permutation(len(data.ids))
    groups = {
        f"pool-{place}": [data.ids[member] for member in order[start : start + clients]]
        for place, start in enumerate(range(0, len(order), clients))
    }

    @functools.cache
    def num_examples(name: str) -> int:
        return sum(data.num_examples(member) for member in groups[name])

    def examples(name: str) -> Any:
        members = [member for member in groups[name] if data.num_examples(member)]
        parts = [data.examples(member) for member in members or groups[name][:1]]
        return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)

    def locate(name: str, row: int | None) -> str:
        if row is None:
            return f"client {name!r}"
        ends = np.cumsum([data.num_examples(member) for member in groups[name]])
        place = int(np.searchsorted(ends, row, side="right"))
        member = groups[name][place]
        return data.locate(member, int(row - ends[place]) + data.num_examples(member))

    return FederatedData(list(groups), num_examples, examples, locate=locate)


_POOLS = 2
"""A stream of its own, beside those of cohorts and clients."""
