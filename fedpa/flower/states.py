"""What clients keep between rounds (SCAFFOLD's c_i) stays on the node.

In Flower's context of the run, which is memory; or, where the node is given a `state-dir`, in
files, which survive the node's process and the server's: a run that is resumed finds them.

A state is kept under the round it is of. The server says which one a client continues from: a state
that a round left which was then not counted is not it, and the one before is still there.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict
from flwr.supercore import log

from fedpa.errors import FedpaError
from fedpa.flower import wire
from fedpa.training.named_arrays import fill_tree, name_arrays, read_npz, to_numpy, write_npz

NEW = 0
"""The round of a client that has taken part in none."""

Arrays = Mapping[str, np.ndarray]


class Store:
    """States by client and round, each in a place of its own: `<hash of the id>-<round>`."""

    def __init__(
        self,
        places: Iterable[str],
        read: Callable[[str], Arrays],
        write: Callable[[str, Arrays], None],
        drop: Callable[[str], None],
    ) -> None:
        self._read, self._write, self._drop = read, write, drop
        self._rounds: dict[str, set[int]] = defaultdict(set)
        for place in places:
            if re.fullmatch(r"[0-9a-f]{32}-\d+", place):
                client, t = place.split("-")
                self._rounds[client].add(int(t))

    def rounds(self, name: str) -> list[int]:
        """The rounds whose states of the client are there."""
        return sorted(self._rounds[_client(name)])

    def take(
        self, template: Any, ids: Sequence[str], since: Sequence[int], floor: int
    ) -> tuple[dict[str, Any], list[str]]:
        """The clients' states of the rounds asked for; and the clients whose state is not here.

        floor: a round that the server may have to return to. A client's last state up to it is
        kept, and what came after; states later than the one asked for are of rounds that never
        counted.
        """
        found, lost = {}, []
        for name, t in zip(ids, since, strict=True):
            there = self.rounds(name)
            needed = max((of for of in there if of <= floor), default=NEW)
            for of in there:
                if of > t or of < min(t, needed):
                    self.drop(name, of)
            if t in there:
                try:
                    found[name] = fill_tree(template, self._read(f"{_client(name)}-{t}"))
                except FedpaError as error:  # damaged: the client starts again, the others continue
                    log(WARNING, "fedpa: the state of client %r can't be read: %s", name, error)
                    self.drop(name, t)
            if t != NEW and name not in found:
                lost.append(name)
        return found, lost

    def put(self, states: Mapping[str, Any], t: int) -> None:
        """Keep the states that round t (from 1) left; not those of a round that comes too late."""
        for name, state in states.items():
            if max(self.rounds(name), default=NEW) <= t:
                arrays = {place: to_numpy(leaf) for place, leaf in name_arrays(state).items()}
                self._write(f"{_client(name)}-{t}", arrays)
                self._rounds[_client(name)].add(t)

    def drop(self, name: str, t: int) -> None:
        self._drop(f"{_client(name)}-{t}")
        self._rounds[_client(name)].remove(t)


def _client(name: str) -> str:
    """What places call a client: its id may be any text."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def in_context(context: RecordDict) -> Store:
    """In the node's memory, for as long as Flower keeps it: to the end of the run, at most."""

    def read(place: str) -> Arrays:
        return {name: array.numpy() for name, array in context.array_records[place].items()}

    def write(place: str, arrays: Arrays) -> None:
        context[place] = wire.pack_arrays(arrays)

    return Store(list(context), read, write, context.__delitem__)


def in_directory(directory: Path) -> Store:
    """In files, one for each client and round."""

    def path(place: str) -> Path:
        return directory / f"{place}.npz"

    def write(place: str, arrays: Arrays) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_npz(path(place), dict(arrays))

    places = [file.stem for file in directory.glob("*.npz")]
    return Store(
        places,
        lambda place: read_npz(path(place)),
        write,
        lambda place: path(place).unlink(missing_ok=True),
    )
