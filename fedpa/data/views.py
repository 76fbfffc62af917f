"""Views of a federation: clients' examples mapped, clients held out, pooled, or read ahead."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from fedpa.data.federated import FederatedData
from fedpa.errors import check_integer
from fedpa.types import ClientArrays


def map_examples(
    data: FederatedData,
    function: Callable[[str, ClientArrays], ClientArrays],
    most: int | None = None,
) -> FederatedData:
    """Map every client's examples by a function, when they are read.

    Args:
        data: The federation.
        function: (id, examples) → examples, as many as before.
        most: At most this many examples per client, the first ones; default: all.
    Returns:
        The federation of mapped examples.
    Example:
        >>> data = fedpa.data.from_mapping({"a": {"x": np.full(3, 255.0)}})
        >>> scaled = map_examples(data, lambda name, arrays: {"x": arrays["x"] / 255}, most=2)
        >>> scaled.examples("a")["x"]
        array([1., 1.])
    """

    def num_examples(name: str) -> int:
        n = data.num_examples(name)
        return n if most is None else min(n, most)

    def examples(name: str) -> Any:
        raw = data.examples(name)
        if most is not None:
            raw = jax.tree.map(lambda array: array[:most], raw)
        return function(name, raw)

    return FederatedData(data.ids, num_examples, examples, locate=data.locate)


HELD_OUT_SEED = 0
"""The same clients for every run's seed: what is chosen is chosen on the same examples."""


def hold_out(data: FederatedData, share: float) -> tuple[FederatedData, FederatedData | None]:
    """Hold out a random share of the clients, the same ones at every call.

    Args:
        data: The federation.
        share: 0 to 1, of the clients; at least one is held out and at least one left.
    Returns:
        The others, and those held out: None if the share is 0 or there is only one client.
    Example:
        >>> data = fedpa.data.from_mapping({k: {"x": np.zeros(3)} for k in range(10)})
        >>> train, validation = hold_out(data, 0.2)
        >>> len(train.ids), len(validation.ids)
        (8, 2)
    """
    if not share or len(data.ids) == 1:
        return data, None
    size = min(max(round(share * len(data.ids)), 1), len(data.ids) - 1)
    rng = np.random.default_rng(HELD_OUT_SEED)
    chosen = set(rng.choice(len(data.ids), size, replace=False).tolist())
    others = [name for place, name in enumerate(data.ids) if place not in chosen]
    these = [name for place, name in enumerate(data.ids) if place in chosen]
    # Packed rows serve both: clients are found in them by name.
    return data._replace(ids=others), data._replace(ids=these)


def pool_clients(data: FederatedData, clients: int, seed: int) -> FederatedData:
    """Deal the clients to groups of `clients` at random; a group is one client, `pool-0`, … .

    Shuffled mini-batches of a group are close to shuffled mini-batches of everybody's examples
    where a group is large, and memory is that of a group, never of the population.

    Args:
        data: The federation.
        clients: Clients per group, at least 1; the last group may have fewer.
        seed: Of the groups.
    Returns:
        The federation of groups.
    Example:
        >>> data = fedpa.data.from_mapping({k: {"x": np.zeros(3)} for k in range(10)})
        >>> pools = pool_clients(data, clients=4, seed=0)
        >>> [pools.num_examples(name) for name in pools.ids]
        [12, 12, 6]
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


class Ahead(NamedTuple):
    data: FederatedData
    """The federation; `examples` gives what has been read already."""
    announce: Callable[[Sequence[str], Sequence[str]], None]
    """(clients of this round, clients of the next): read the next; forget all others."""


@contextlib.contextmanager
def read_ahead(data: FederatedData, whole_cohort: bool = True) -> Iterator[Ahead]:
    """Read ahead in one thread. Memory is that of two cohorts. What is in memory stays as it is.

    whole_cohort: False where this process reads only some of a round's clients; it reads them when
        their turn comes.
    """
    if data.packed is not None or not whole_cohort:
        yield Ahead(data, lambda now, following: None)
        return
    known: dict[str, Future[Any]] = {}
    pool = ThreadPoolExecutor(1, thread_name_prefix="fedpa-reading")

    def announce(now: Sequence[str], following: Sequence[str]) -> None:
        wanted = dict.fromkeys([*now, *following])
        for name in [name for name in known if name not in wanted]:
            known.pop(name).cancel()
        for name in wanted:
            if name not in known:
                known[name] = pool.submit(data.examples, name)

    def examples(name: str) -> Any:
        reading = known.get(name)
        return data.examples(name) if reading is None else reading.result()

    try:
        yield Ahead(data._replace(examples=examples), announce)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
