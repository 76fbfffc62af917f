"""The nodes of a run: which are connected, which clients each holds, messages to them.

A node that appears is asked, and takes part once it has answered; one that left a round unanswered
is asked again before it is sent another. No round waits for that.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

import fedpa
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.flower import wire

AGAIN = 5.0
"""Seconds after which a node that could not answer is asked again."""
LOOK = 1.0
"""Seconds between looks for nodes that appear, while a round's answers are waited for."""
LARGEST_CLIENT = 10_000_000
"""Examples that a client may claim to have by default: they are its weight."""
LONGEST_NAME = 200
"""Characters of a node's name, and of a client's id."""
REASONS = 5
"""Nodes whose reasons are given when a run can't start."""


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


def read_connection(table: Mapping[str, Any]) -> Connection:
    """The connection's settings among a run's, checked."""
    connection = wire.read_settings(Connection, table, "run config", others=True)
    check_integer("min-nodes", connection.min_nodes, 1)
    check_integer("largest-client", connection.largest_client, 1)
    for name in ("start_timeout", "round_timeout", "poll"):
        value = getattr(connection, name)
        if not 0 < value < math.inf:
            raise refuse(name.replace("_", "-"), value, "must be a number of seconds above 0")
    if connection.out and not Path(connection.out).is_absolute():
        expected = "must be an absolute path: the server's directory is not the one you are in"
        raise refuse("out", connection.out, expected)
    return connection


class Site(NamedTuple):
    """A node that takes part."""

    name: str
    sizes: Mapping[str, int]
    """Its clients, and their numbers of examples."""


class Excluded(NamedTuple):
    """A node that does not."""

    reason: str
    until: float = math.inf
    """When it is asked again."""


class Roster:
    """The nodes of a run, as far as is known now."""

    def __init__(self, grid: Grid, connection: Connection, arrays: Mapping[str, str]) -> None:
        """`arrays`: what must be the same on the nodes, from `describe_node`."""
        self.grid, self.connection = grid, connection
        query = wire.Query(fedpa.__version__, json.dumps(arrays))
        self.query = RecordDict({wire.CONFIG: wire.write_fields(query)})
        self.sites: dict[int, Site] = {}
        """Nodes that have answered, and have not been silent since."""
        self.excluded: dict[int, Excluded] = {}
        """Nodes that can't take part."""
        self.asked: dict[str, int] = {}
        """Queries that have no answer yet → node."""
        self.started = False
        """Whether it has been decided which clients the run has."""
        self._replaced: dict[int, int] = {}

    def refresh(self) -> None:
        """See which nodes are connected. New ones are asked; those that are gone are forgotten."""
        present = set(self.grid.get_node_ids())
        for gone in self.sites.keys() - present:
            self.suspect(gone)
        for gone in self.excluded.keys() - present:
            del self.excluded[gone]
        now = time.monotonic()
        for node, answer in self._pull(self.asked).items():
            self.asked = {name: other for name, other in self.asked.items() if other != node}
            if isinstance(answer, wire.NodeError):
                self.excluded[node] = Excluded(f"node {node} failed ({answer})", now + AGAIN)
            else:
                self.excluded.pop(node, None)
                self._meet(node, answer)
        self.asked = {name: node for name, node in self.asked.items() if node in present}
        known = self.sites.keys() | set(self.asked.values())
        known |= {node for node, excluded in self.excluded.items() if excluded.until > now}
        new = dict.fromkeys(sorted(present - known), self.query)
        if new:
            ttl = max(self.connection.start_timeout, self.connection.round_timeout)
            self.asked |= self._push(new, MessageType.QUERY, "who", ttl)

    def exchange(
        self, contents: Mapping[int, RecordDict], group: str
    ) -> dict[int, RecordDict | wire.NodeError]:
        """Send a round's messages; all nodes' answers, within `round_timeout` seconds.

        Nodes that appear meanwhile are asked what they hold, and are in the next round. (Flower's
        own `send_and_receive` looks for answers every three seconds.)
        """
        timeout = self.connection.round_timeout
        waiting = self._push(contents, MessageType.TRAIN, group, timeout)
        began = looked = time.monotonic()
        answers: dict[int, RecordDict | wire.NodeError] = {
            node: wire.NodeError("the message could not be sent")
            for node in contents.keys() - set(waiting.values())
        }
        while True:
            answers |= self._pull(waiting)
            waiting = {name: node for name, node in waiting.items() if node not in answers}
            now = time.monotonic()
            if not waiting or now > began + timeout:
                break
            if now >= looked + LOOK:
                self.refresh()
                looked = now
            time.sleep(self.connection.poll)
        late = {node: wire.NodeError(f"no answer in {timeout:g} s") for node in waiting.values()}
        return answers | late

    def _push(
        self, contents: Mapping[int, RecordDict], kind: str, group: str, ttl: float
    ) -> dict[str, int]:
        """Send each node its message; message id → node."""
        ids = self.grid.push_messages(
            [
                Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=ttl)
                for node, content in contents.items()
            ]
        )
        return {name: node for name, node in zip(ids, contents, strict=True) if name}

    def _pull(self, waiting: Mapping[str, int]) -> dict[int, RecordDict | wire.NodeError]:
        """The answers that have arrived, by node.

        Flower's own errors don't say which node they are about; what they reply to does.
        """
        answers: dict[int, RecordDict | wire.NodeError] = {}
        for message in self.grid.pull_messages(list(waiting)) if waiting else ():
            node = waiting.get(message.metadata.reply_to_message_id)
            if node is not None:
                failed = message.has_error()
                answers[node] = (
                    wire.NodeError(wire.describe_error(message.error))
                    if failed
                    else message.content
                )
        return answers

    def suspect(self, node: int) -> None:
        """Leave the node out until it has answered again.

        What others were excluded for may have been because of it: they are asked again, too.
        """
        self.sites.pop(node, None)
        self.excluded.clear()

    def holders(self) -> dict[str, int]:
        """client → the node that holds it now."""
        return {name: node for node, site in sorted(self.sites.items()) for name in site.sizes}

    def sizes(self) -> dict[str, int]:
        """All clients of the connected nodes, and their numbers of examples."""
        return {name: n for site in self.sites.values() for name, n in site.sizes.items()}

    def wait(self, least: int, what: str) -> None:
        """Wait until `least` nodes, and all that are connected, have said what they hold.

        After `start_timeout` seconds `least` are enough. If there are fewer then, or, before the
        run has started, as soon as that many are connected, all have answered and too few can take
        part, raises FedpaError with the nodes' reasons. `what` begins its message.
        """
        timeout = self.connection.start_timeout
        deadline = time.monotonic() + timeout
        while True:
            late = time.monotonic() > deadline
            self.refresh()
            if len(self.sites) >= least and (late or not self.asked):
                self.started = True
                return
            settled = not self.asked and all(e.until == math.inf for e in self.excluded.values())
            hopeless = settled and len(self.sites) + len(self.excluded) >= least
            if hopeless and not self.started:
                raise FedpaError(f"{what} {self._count_nodes()}")
            if late:
                raise FedpaError(
                    f"{what} {self._count_nodes(f' after start-timeout = {timeout:g} s')}"
                )
            time.sleep(self.connection.poll)

    def _count_nodes(self, after: str = "") -> str:
        reasons = {node: f"node {node} has not answered" for node in self.asked.values()}
        reasons |= {node: excluded.reason for node, excluded in self.excluded.items()}
        here = len(self.sites.keys() | reasons.keys())
        text = f"{len(self.sites)} of {here} connected nodes can take part{after}"
        shown = list(reasons.values())[:REASONS]
        if len(reasons) > REASONS:
            shown.append(f"and {len(reasons) - REASONS} more")
        return f"{text}: {', '.join(shown)}" if shown else text

    def _meet(self, node: int, content: RecordDict) -> None:
        """Enter a node that has answered, or exclude it."""
        name = f"node {node}"
        try:
            with wire.reading():
                said: Any = content.get(wire.CONFIG, {})
                name = wire.escape_text(said.get("name") or name, LONGEST_NAME)
                sizes = self._read_sizes(wire.read_fields(wire.Introduction, content))
            self._make_room(node, name, sizes)
        except wire.WireError as error:
            self.excluded[node] = Excluded(f"{name} refused ({error})")
            log(ERROR, "fedpa: %s", self.excluded[node].reason)
        else:
            self.sites[node] = Site(name, sizes)
            log(INFO, "fedpa: %s holds %d clients", name, len(sizes))

    def _read_sizes(self, said: wire.Introduction) -> dict[str, int]:
        """The clients that a node says it holds, with their numbers of examples."""
        ids = said.clients
        if len(ids) != len(said.examples):
            raise wire.WireError("clients and examples must be lists of one length")
        for client, n in zip(ids, said.examples, strict=True):
            shown = wire.escape_text(client, 100)
            wire.check_count(f"examples of client {shown!r}", n, self.connection.largest_client)
            if client != wire.escape_text(client, LONGEST_NAME):  # it will be in logs and files
                raise wire.WireError(
                    f"client {shown!r}: an id must be at most {LONGEST_NAME} printable characters"
                )
        if not ids or len(set(ids)) < len(ids):
            raise wire.WireError("must hold at least one client, and each once")
        return dict(zip(ids, said.examples, strict=True))

    def _make_room(self, node: int, name: str, sizes: Mapping[str, int]) -> None:
        """Refuse a node that holds another's client, unless it holds exactly the same ones.

        Before the run has started the run is refused: which node answers first would decide.

        A node with the same clients may have been restarted after a crash: Flower lists the old one
        for a minute. That one is asked again; if it is still there, it is the one that is refused.
        """
        for other, theirs in list(self.sites.items()):
            both = sorted(sizes.keys() & theirs.sizes.keys())
            if not both or other == node:
                continue
            if sizes != theirs.sizes or self._replaced.get(other) == node:
                what = (
                    f"{name} and {theirs.name} both hold client {both[0]!r}: a client's data must "
                    "be on one node"
                )
                raise wire.WireError(what) if self.started else FedpaError(what)
            what = f"{name} holds the same clients as {theirs.name}, and replaces it"
            log(WARNING, "fedpa: %s (which is asked whether it is still there)", what)
            self._replaced[node] = other
            self.suspect(other)
