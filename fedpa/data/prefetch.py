"""The next round's clients are read while this round runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from fedpa.data.federated import FederatedData


class Ahead(NamedTuple):
    data: FederatedData
    """The federation; `examples` gives what has been read already."""
    announce: Callable[[Sequence[str], Sequence[str]], None]
    """(clients of this round, clients of the next): read the next; forget all others."""


@contextlib.contextmanager
def ahead(data: FederatedData, whole_cohort: bool = True) -> Iterator[Ahead]:
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
