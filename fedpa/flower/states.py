"""What clients keep between rounds (SCAFFOLD's c_i) stays on the node.

In Flower's context of the run, which is memory; or, where the node is given a `state-dir`, in
files, which outlive the node's process and the server's: a run that is gone on with finds them.

A state is kept under the round it is of. The server says which it wants a client to go on from: one
that a round left, which was then not counted, is not it, and the one before is there still.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import RecordDict
from flwr.supercore import log

from fedpa.errors import FedpaError
from fedpa.flower.records import ARRAYS, SCALARS, packed, unpacked
from fedpa.training.named_arrays import fill_tree, name_arrays, read_npz, to_numpy, write_npz

NEW = 0
"""The round of a client that has taken part in none."""


class Store(NamedTuple):
    """Where states are, by client and round."""

    rounds: Callable[[str], list[int]]
    """client → the rounds whose states are there."""
    read: Callable[[str, int, Any], Any]
    """client, round, the tree's shapes → state."""
    write: Callable[[str, int, Any], None]
    drop: Callable[[str, int], None]


def taken(
    store: Store, template: Any, ids: Sequence[str], since: Sequence[int], floor: int
) -> tuple[dict[str, Any], list[str]]:
    """The clients' states of the rounds asked for; and the clients whose state is not here.

    floor: a round that the server may have to go back to. A client's last state up to it is kept,
    and what came after; states later than the one asked for are of rounds that never counted.
    """
    found, lost = {}, []
    for name, t in zip(ids, since, strict=True):
        there = store.rounds(name)
        needed = max((of for of in there if of <= floor), default=NEW)
        for of in there:
            if of > t or of < min(t, needed):
                store.drop(name, of)
        if t in there:
            try:
                found[name] = store.read(name, t, template)
            except FedpaError as error:  # damaged: the client begins anew, the others go on
                log(WARNING, "fedpa: what client %r kept can't be read: %s", name, error)
                store.drop(name, t)
        if t != NEW and name not in found:
            lost.append(name)
    return found, lost


def put(store: Store, states: Mapping[str, Any], t: int) -> None:
    """Keep the states that round t (from 1) left; not those of a round that comes too late."""
    for name, state in states.items():
        if max(store.rounds(name), default=NEW) <= t:
            store.write(name, t, state)


def in_context(context: RecordDict) -> Store:
    """In the node's memory, for as long as Flower keeps it: to the end of the run, at most."""

    def key(name: str, t: int, kind: str) -> str:
        return f"{name}\n{t}\n{kind}"

    def rounds(name: str) -> list[int]:
        keys = (place.rsplit("\n", 2) for place in context)
        return [int(of) for whose, of, kind in keys if whose == name and kind == ARRAYS]

    def read(name: str, t: int, template: Any) -> Any:
        return unpacked(template, {kind: context[key(name, t, kind)] for kind in (ARRAYS, SCALARS)})

    def write(name: str, t: int, state: Any) -> None:
        for kind, record in packed(state).items():
            context[key(name, t, kind)] = record

    def drop(name: str, t: int) -> None:
        for kind in (ARRAYS, SCALARS):
            del context[key(name, t, kind)]

    return Store(rounds, read, write, drop)


def in_directory(directory: Path) -> Store:
    """In files, one for each client and round; names of clients may be any text."""

    def begin(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:32]

    def path(name: str, t: int) -> Path:
        return directory / f"{begin(name)}-{t}.npz"

    def rounds(name: str) -> list[int]:
        files = directory.glob(f"{begin(name)}-*.npz")
        return sorted(int(file.stem.rsplit("-", 1)[1]) for file in files)

    def read(name: str, t: int, template: Any) -> Any:
        return fill_tree(template, read_npz(path(name, t)))

    def write(name: str, t: int, state: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_npz(
            path(name, t), {place: to_numpy(leaf) for place, leaf in name_arrays(state).items()}
        )

    def drop(name: str, t: int) -> None:
        path(name, t).unlink(missing_ok=True)

    return Store(rounds, read, write, drop)
