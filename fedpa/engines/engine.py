"""The interface of engines, which run clients and average their results, for any algorithm.

(client update, aggregation, message, cohort) → the aggregate, and each client's info and new state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.algorithms.fedopt import Algorithm, ClientState, ClientUpdate, Message
from fedpa.server.aggregation import Aggregate, Aggregation
from fedpa.types import ClientArrays, Keys, Params


class Packed(NamedTuple):
    """Many clients' examples one after the other, in few arrays: an engine moves them once."""

    load: Callable[[str], ClientArrays]
    """The function that reads single clients; if it changes, this is out of date."""
    structure: Any
    arrays: Sequence[np.ndarray]
    position: Mapping[str, int]
    """id → its place in the two that follow."""
    start: np.ndarray
    """The first row of each client."""
    sizes: np.ndarray


class Cohort(NamedTuple):
    """The clients of one round, S in Algorithm 1.

    Args:
        ids: The clients' ids, each once.
        load: id → the client's examples; read when its turn comes, not before.
        keys: One key per client, in the order of `ids`.
        states: id → what the client has kept from earlier rounds.
        sizes: n_i, in the order of `ids`: clients of like sizes are run together.
        packed: All clients' examples in few arrays, if they are in memory (default: None).
        population: n_i of all that may come in later rounds: programs for them are made in the
            first (default: ()).
        round: t, from 0 (default: 0).
        expected: How many clients cohorts have on average, if their sizes vary: programs are as
            wide as that needs, so that no new size is compiled for (default: None).
    Example:
        >>> data = fedpa.data.from_mapping({"a": {"x": np.zeros((3, 2))}})
        >>> keys = jax.random.split(jax.random.key(0), 1)
        >>> cohort = fedpa.engines.Cohort(["a"], data.examples, keys, {"a": ()}, sizes=[3])
    """

    ids: Sequence[str]
    load: Callable[[str], ClientArrays]
    keys: Keys
    states: Mapping[str, ClientState]
    sizes: Sequence[int]
    packed: Packed | None = None
    population: Sequence[int] = ()
    round: int = 0
    expected: int | None = None

    @property
    def usual_size(self) -> int:
        """How many clients programs are made for."""
        return len(self.ids) if self.expected is None else self.expected


class Traffic(NamedTuple):
    """Bytes that crossed a network, of the whole cohort."""

    up: int
    down: int


class RoundResult(NamedTuple):
    """The result of a round.

    Args:
        aggregate: The clients' results as one.
        infos: Each of the client info's scalars, for every client of the cohort.
        accepted: Whether a client's result entered the aggregate.
        examples: n_i.
        states: id → what the client keeps for later rounds.
        failures: What went wrong, for each client that raised an error instead of giving a result.
        bytes_up: What one client sends: its result and weight, as they are before they are summed.
        traffic: Where there was a network: what was sent (default: None).
    Example:
        >>> result = fedpa.engines.RoundResult(
        ...     aggregate=fedpa.server.Aggregate(jnp.zeros(2), jnp.float32(3)),
        ...     infos={"loss": np.array([0.5])}, accepted=np.array([True]),
        ...     examples=np.array([3]), states={"a": ()}, failures={}, bytes_up=12,
        ... )
        >>> result.failures, result.traffic
        ({}, None)
    """

    aggregate: Aggregate
    infos: Mapping[str, np.ndarray]
    accepted: np.ndarray
    examples: np.ndarray
    states: Mapping[str, ClientState]
    failures: Mapping[str, str]
    bytes_up: int
    traffic: Traffic | None = None


Engine = Callable[[ClientUpdate, Aggregation, Message, Cohort], RoundResult]
"""(client update, aggregation, message, cohort) → the round's result: where clients run."""


class OfAlgorithm(NamedTuple):
    """An engine that depends on the algorithm, such as one for clients on other machines."""

    make: Callable[[Algorithm, Params], tuple[Algorithm, Engine]]
    """(algorithm, θ) → the algorithm as the round loop runs it, and the engine."""


class Report(NamedTuple):
    """Results of some clients of a cohort, besides their part of the sum."""

    members: Sequence[int]
    """Their positions in the cohort; the first entries of all that follows are theirs."""
    infos: Mapping[str, Any]
    accepted: Any
    examples: Any
    states: Any = ()
    """Stacked on axis 0; without arrays where clients keep nothing."""


def collect_reports(
    cohort: Cohort,
    aggregate: Aggregate,
    reports: Iterable[Report],
    failures: Mapping[str, str],
    bytes_up: int,
) -> RoundResult:
    """Assemble a round's result. A client that failed or is in no report keeps its state."""
    size = len(cohort.ids)
    infos: dict[str, np.ndarray] = {}
    accepted, examples = np.zeros(size, bool), np.zeros(size, np.int64)
    states = {name: cohort.states[name] for name in cohort.ids}
    for report in reports:
        lane_of = {
            member: lane
            for lane, member in enumerate(report.members)
            if cohort.ids[member] not in failures
        }
        members, lanes = list(lane_of), list(lane_of.values())
        for name, values in report.infos.items():
            blank = np.full(size, np.nan)
            infos.setdefault(name, blank)[members] = np.asarray(values)[lanes]
        accepted[members] = np.asarray(report.accepted)[lanes]
        examples[members] = np.asarray(report.examples)[lanes]
        if jax.tree.leaves(report.states):
            for member, lane in lane_of.items():
                own = jax.tree.map(lambda x, lane=lane: np.array(x[lane]), report.states)
                states[cohort.ids[member]] = own
    return RoundResult(aggregate, infos, accepted, examples, states, failures, bytes_up)


def raw_keys(cohort: Cohort) -> np.ndarray:
    """The numbers of the clients' keys: they travel between host, devices and processes."""
    return np.asarray(jax.random.key_data(cohort.keys))


def num_bytes(tree: Any) -> int:
    """The size of a tree's arrays, or of the arrays their shapes describe."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
