"""Where clients run. An engine moves, weighs and averages; it does not know the algorithm.

(client update, aggregation, message, cohort) → the aggregate, and each client's info and new state.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.algorithms.algorithm import ClientState, ClientUpdate, Message
from fedpa.server.aggregation import Aggregate, Aggregation
from fedpa.types import Keys


class Cohort(NamedTuple):
    """The clients of one round, S in Algorithm 1."""

    ids: Sequence[str]
    load: Callable[[str], Any]
    """id → the client's examples; read when its turn comes, not before."""
    keys: Keys
    """One key per client, in the order of `ids`."""
    states: Mapping[str, ClientState]


class RoundResult(NamedTuple):
    aggregate: Aggregate
    infos: Mapping[str, np.ndarray]
    """Each of the client info's scalars, for every client of the cohort."""
    accepted: np.ndarray
    """Whether a client's result entered the aggregate."""
    examples: np.ndarray
    """n_i."""
    states: Mapping[str, ClientState]
    bytes_up: int
    """What one client sends: its result and weight, as they are before they are summed."""


Engine = Callable[[ClientUpdate, Aggregation, Message, Cohort], RoundResult]


def collect(
    aggregate: Aggregate,
    infos: list[Any],
    accepted: list[Any],
    examples: list[int],
    states: Mapping[str, ClientState],
    bytes_up: int,
) -> RoundResult:
    """Stack what was gathered client by client, on the host."""
    stacked = {
        name: np.array([np.asarray(info._asdict()[name]) for info in infos])
        for name in infos[0]._fields
    }
    flags = np.array([bool(a) for a in accepted])
    return RoundResult(aggregate, stacked, flags, np.array(examples), states, bytes_up)


def num_bytes(tree: Any) -> int:
    """The size of a tree's arrays, or of the arrays their shapes describe."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
