"""A node's settings, its clients, and their states between rounds.

The settings, `flower-supernode --node-config`, are a flat table of strings and numbers.

Client states (SCAFFOLD's c_i, EP's t_i) stay on the node: in memory, in Flower's context of the
run, or, with `state-dir`, in files, which a resumed run finds again. A state is stored under its
round. The server tells from which round a client continues: a state of a round that was not counted
is not used, and the one before it is still stored.
"""

import dataclasses
import hashlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord
from flwr.supercore import log

from fedpa.data.federated import FederatedData
from fedpa.data.readers.npz import read_npz
from fedpa.errors import FedpaError, check_integer, explain, refuse
from fedpa.flower import wire
from fedpa.training.named_arrays import write_npz

NEW = 0
"""The round of a client that has not taken part yet."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """The settings of a node."""

    name: str = ""
    """Its name in messages; default: its partition or number."""
    data_dir: str | None = None
    """Directory of its data; default: FEDPA_DATA or the user's data directory."""
    clients: str = ""
    """Client ids separated by commas; default: all clients of its data."""
    clients_file: str = ""
    """A file with one id per line."""
    partition_id: int | None = None
    """For trials: the node has every `num_partitions`-th client, starting with this one."""
    num_partitions: int | None = None
    state_dir: str = ""
    """Where its clients' states between rounds are written, an absolute path; default: in memory
    only."""


def read_holding(table: Mapping[str, Any]) -> Holding:
    """Read and check the node's settings."""
    holding = wire.read_settings(Holding, table, "node config")
    if holding.data_dir and not Path(holding.data_dir).is_dir():
        raise refuse("node config: data-dir", holding.data_dir, "is not a directory on the node")
    if holding.state_dir:
        if not Path(holding.state_dir).is_absolute():
            raise refuse("node config: state-dir", holding.state_dir, "must be an absolute path")
        try:
            Path(holding.state_dir).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=holding.state_dir):
                pass
        except OSError as error:
            expected = f"can't be written to: {explain(error)}"
            raise refuse("node config: state-dir", holding.state_dir, expected) from None
    return holding


def select_clients(holding: Holding, data: FederatedData) -> FederatedData:
    """Select the node's clients from its data."""
    ids = list(data.ids)
    wanted = [name.strip() for name in holding.clients.split(",") if name.strip()]
    if holding.clients_file:
        if wanted:
            raise FedpaError("node config: clients and clients-file are both given: give one")
        wanted = _read_lines(holding.clients_file)
    part, parts = holding.partition_id, holding.num_partitions
    if wanted:
        missing = sorted(set(wanted) - set(ids))
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            some = ", ".join(map(repr, ids[:3]))
            raise FedpaError(
                f"node config: clients: the node's data has no client {missing[0]!r}{more} to "
                f"train: it has {len(ids)}: {some}{', …' if len(ids) > 3 else ''}"
            )
        ids = sorted(set(wanted))
    elif part is not None and parts is not None:
        check_integer("node config: num-partitions", parts, 1)
        check_integer("node config: partition-id", part, 0)
        if part >= parts:
            expected = f"must be less than num-partitions = {parts}"
            raise refuse("node config: partition-id", part, expected)
        ids = ids[part::parts]
    elif part is not None or parts is not None:
        raise FedpaError("node config: partition-id and num-partitions: give both or neither")
    if not ids:
        raise FedpaError("node config: the node has no clients: its data has none for it")
    return data._replace(ids=ids)


def _read_lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        expected = f"can't be read: {explain(error)}"
        raise refuse("node config: clients-file", path, expected) from None
    return [line.strip() for line in lines if line.strip()]


class StateStore:
    """Clients' states by round.

    Args:
        places: Where they are, by `<hash of the id>-<round>`: Flower's context, or `StateFiles`.
    """

    def __init__(self, places: MutableMapping[str, Any]) -> None:
        self._places = places
        self._rounds: dict[str, set[int]] = defaultdict(set)
        for place in places:
            if re.fullmatch(r"[0-9a-f]{32}-\d+", place):
                client, t = place.split("-")
                self._rounds[client].add(int(t))

    def rounds(self, name: str) -> list[int]:
        """List the rounds for which a state of the client is stored."""
        return sorted(self._rounds[_hash(name)])

    def take(
        self, template: Any, ids: Sequence[str], since: Sequence[int], floor: int
    ) -> tuple[dict[str, Any], list[str]]:
        """Read the clients' states of the requested rounds, and list clients without a state.

        floor: a round that the server may return to. A client's last state up to it and later ones
        are kept; states later than the requested one are from rounds that did not count.
        """
        states, lost = {}, []
        for name, t in zip(ids, since, strict=True):
            there = self.rounds(name)
            needed = max((of for of in there if of <= floor), default=NEW)
            for of in there:
                if of > t or of < min(t, needed):
                    self._drop(name, of)
            if t in there:
                try:
                    states[name] = wire.unpack(template, self._places[f"{_hash(name)}-{t}"])
                except FedpaError as error:  # damaged: the client starts again, the others continue
                    log(WARNING, "fedpa: the state of client %r can't be read: %s", name, error)
                    self._drop(name, t)
            if t != NEW and name not in states:
                lost.append(name)
        return states, lost

    def put(self, states: Mapping[str, Any], t: int) -> None:
        """Store the states of round t (from 1), unless a later round is already stored."""
        for name, state in states.items():
            if max(self.rounds(name), default=NEW) <= t:
                self._places[f"{_hash(name)}-{t}"] = wire.pack(state)
                self._rounds[_hash(name)].add(t)

    def _drop(self, name: str, t: int) -> None:
        del self._places[f"{_hash(name)}-{t}"]
        self._rounds[_hash(name)].remove(t)


def _hash(name: str) -> str:
    """Make a client's key by hashing its id, which may be any string."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


class StateFiles(MutableMapping[str, ArrayRecord]):
    """Records of arrays in a directory, one .npz file each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _path(self, place: str) -> Path:
        return self._directory / f"{place}.npz"

    def __getitem__(self, place: str) -> ArrayRecord:
        arrays = read_npz(self._path(place))
        return ArrayRecord({name: Array(array) for name, array in arrays.items()})

    def __setitem__(self, place: str, record: ArrayRecord) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        write_npz(self._path(place), {name: array.numpy() for name, array in record.items()})

    def __delitem__(self, place: str) -> None:
        self._path(place).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._directory.glob("*.npz"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
