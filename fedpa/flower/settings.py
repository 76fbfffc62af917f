"""A connection's and a node's settings, as Flower has them: flat tables of texts and numbers.

The run's, `[tool.flwr.app.config]` and `flwr run -c`, include those of the connection. Names that
begin with `app.` are the app's own. A node's, `flower-supernode --node-config`, say where its data
is and whose.
"""

import dataclasses
import difflib
import tempfile
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpa.data.federated import FederatedData
from fedpa.errors import FedpaError, check_integer, check_number, convert_value, explain, refuse

OWN = "app."
"""Begins the names of settings that are the app's, not ours."""
LARGEST_CLIENT = 10_000_000
"""Examples that a client may claim to have by default: they are its weight."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """What a run over a network needs beside its own settings."""

    out: str = ""
    """Run directory, an absolute path on the server's machine; a run in it is resumed."""
    min_nodes: int = 1
    """Nodes that must be connected before the run begins; their clients are its population."""
    start_timeout: float = 60.0
    """Seconds to wait for them, and later, when all are gone, for one to come back."""
    round_timeout: float = 600.0
    """Seconds after which a round continues without the nodes that have not answered."""
    poll: float = 0.1
    """Seconds between looks for answers."""
    largest_client: int = LARGEST_CLIENT
    """Examples that a client may claim to have: they are its weight."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a node holds."""

    name: str = ""
    """Its name in messages; default: its partition or number."""
    data_dir: str | None = None
    """Directory of its data; default: FEDPA_DATA or the user's data directory."""
    clients: str = ""
    """Ids, with commas between them; default: all clients of its data."""
    clients_file: str = ""
    """A file with one id a line."""
    partition_id: int | None = None
    """It holds every `num_partitions`-th client, beginning with this one: for trying out."""
    num_partitions: int | None = None
    state_dir: str = ""
    """Where its clients' states between rounds are written, an absolute path; default: in memory
    only."""


def read_connection(table: Mapping[str, Any]) -> Connection:
    """The connection's settings among a run's, checked."""
    connection: Connection = _read(Connection, table, "run config", others=True)
    check_integer("min-nodes", connection.min_nodes, 1)
    check_integer("largest-client", connection.largest_client, 1)
    for name in ("start_timeout", "round_timeout", "poll"):
        value = getattr(connection, name)
        check_number(name.replace("_", "-"), value)
        if value <= 0:
            raise refuse(name.replace("_", "-"), value, "must be a number of seconds above 0")
    if connection.out and not Path(connection.out).is_absolute():
        expected = "must be an absolute path: the server's directory is not the one you are in"
        raise refuse("out", connection.out, expected)
    return connection


def read_holding(table: Mapping[str, Any]) -> Holding:
    """The node's settings, checked: they say whose data takes part."""
    holding: Holding = _read(Holding, table, "node config", others=False)
    if holding.data_dir and not Path(holding.data_dir).is_dir():
        raise refuse("node config: data-dir", holding.data_dir, "is not a directory on the node")
    if holding.state_dir and not Path(holding.state_dir).is_absolute():
        raise refuse("node config: state-dir", holding.state_dir, "must be an absolute path")
    return holding


def _read(kind: Any, table: Mapping[str, Any], where: str, others: bool) -> Any:
    """The settings of `kind` in the table. others: whether there may be settings of others."""
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in hints:
            values[name] = convert_value(hints[name], value, f"{where}: {key}")
        elif not others and not key.startswith(OWN):
            raise unknown_setting(where, key, list(hints))
    return kind(**values)


def unknown_setting(where: str, key: str, known: list[str]) -> FedpaError:
    names = [name.replace("_", "-") for name in known]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"a setting of the app itself is {OWN}{key}"
    return FedpaError(f"{where}: unknown field {key}: {hint}")


def check_state_dir(holding: Holding) -> None:
    """Refuse a directory that can't be written to, before any training."""
    if not holding.state_dir:
        return
    try:
        Path(holding.state_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=holding.state_dir):
            pass
    except OSError as error:
        expected = f"can't be written to: {explain(error)}"
        raise refuse("node config: state-dir", holding.state_dir, expected) from None


def select_clients(holding: Holding, data: FederatedData) -> FederatedData:
    """The node's clients, of those in its data."""
    ids = list(data.ids)
    wanted = [name.strip() for name in holding.clients.split(",") if name.strip()]
    if holding.clients_file:
        if wanted:
            raise FedpaError("node config: clients and clients-file are both given: give one")
        wanted = _lines(holding.clients_file)
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
    elif holding.partition_id is not None and holding.num_partitions is not None:
        check_integer("node config: num-partitions", holding.num_partitions, 1)
        check_integer("node config: partition-id", holding.partition_id, 0)
        if holding.partition_id >= holding.num_partitions:
            expected = f"must be less than num-partitions = {holding.num_partitions}"
            raise refuse("node config: partition-id", holding.partition_id, expected)
        ids = ids[holding.partition_id :: holding.num_partitions]
    elif holding.partition_id is not None or holding.num_partitions is not None:
        raise FedpaError("node config: partition-id and num-partitions: give both or neither")
    if not ids:
        raise FedpaError("node config: the node holds no client: its data has none for it")
    return data._replace(ids=ids)


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        expected = f"can't be read: {explain(error)}"
        raise refuse("node config: clients-file", path, expected) from None
    return [line.strip() for line in lines if line.strip()]
