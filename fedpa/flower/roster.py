"""The nodes of a run: which are connected, which clients each has, messages to them.

A new node is queried, and takes part once it has replied. A node that did not reply in a round is
queried again before it gets another round. Rounds do not wait for that.
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
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

import fedpa
from fedpa.errors import FedpaError, check_integer, check_number, refuse
from fedpa.flower import wire

AGAIN = 5.0
"""Seconds after which a node that failed to reply is queried again."""
LOOK = 1.0
"""Seconds between checks for new nodes while waiting for a round's replies."""
LARGEST_CLIENT = 10_000_000
"""Default for the largest number of examples of a client, which is its weight."""
INVALID = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, DecodeError)
"""What Flower raises for a message that it can't build from its bytes. Errors of the network are
others, and end the run."""
REASONS = 5
"""Nodes whose reasons are given when a run can't start."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """Settings of the connection, in addition to the run's."""

    out: str = ""
    """Run directory, an absolute path on the server; a run in it is resumed."""
    min_nodes: int = 1
    """Number of nodes needed to start; their clients are the run's population."""
    start_timeout: float = 60.0
    """Seconds to wait for them, and later, if all are lost, for one to return."""
    round_timeout: float = 600.0
    """Seconds after which a round continues without nodes that have not replied."""
    poll: float = 0.1
    """Seconds between checks for replies."""
    largest_client: int = LARGEST_CLIENT
    """Largest number of examples that a client may report, since it is its weight."""
    largest_ratio: float = 10.0
    """Largest weight of a client, as a multiple of the median number of examples that clients
    report; 0: any. Of m clients, one has then at most the share 10/(9 + m) of a round's weight."""


def read_connection(table: Mapping[str, Any]) -> Connection:
    """Read and check the connection's settings among a run's."""
    connection = wire.read_settings(Connection, table, "run config", others=True)
    check_integer("min-nodes", connection.min_nodes, 1)
    check_integer("largest-client", connection.largest_client, 1)
    check_number("largest-ratio", connection.largest_ratio)
    for name in ("start_timeout", "round_timeout", "poll"):
        value = getattr(connection, name)
        if not 0 < value < math.inf:
            raise refuse(name.replace("_", "-"), value, "must be a number of seconds above 0")
    if connection.out and not Path(connection.out).is_absolute():
        expected = "must be an absolute path, since the server has another working directory"
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
    """Time of the next query."""


class Roster:
    """The nodes of a run, as currently known."""

    def __init__(self, grid: Grid, connection: Connection, arrays: Mapping[str, str]) -> None:
        """`arrays`: what must be the same on the nodes, from `describe_node`."""
        self.grid, self.connection = grid, connection
        query = wire.Query(fedpa.__version__, json.dumps(arrays))
        self.query = RecordDict({wire.CONFIG: wire.write_fields(query)})
        self.sites: dict[int, Site] = {}
        """Nodes that have replied, also to their last message."""
        self.excluded: dict[int, Excluded] = {}
        """Nodes that can't take part."""
        self.asked: dict[str, int] = {}
        """Queries without a reply → node."""
        self.started = False
        """Whether the run's clients are fixed."""
        self._replaced: dict[int, int] = {}
        self._pulls_singly = False
        """Whether a node has sent what Flower can't read: no other answer is to be lost with it."""

    def refresh(self) -> None:
        """Update the connected nodes: query new ones, remove lost ones."""
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
        """Send a round's messages; return the replies within `round_timeout` seconds.

        Nodes that connect meanwhile are queried, and take part in the next round. (Flower's
        `send_and_receive` checks for replies only every three seconds.)
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
        """Collect the replies that have arrived, by node.

        Flower's errors don't name their node; the message they reply to does.
        """
        answers: dict[int, RecordDict | wire.NodeError] = {}
        if self._pulls_singly and len(waiting) > 1:
            for name, node in waiting.items():
                answers |= self._pull({name: node})
            return answers
        try:
            messages = list(self.grid.pull_messages(list(waiting))) if waiting else []
        except INVALID as error:
            # Flower can't build one of the messages, does not say whose, and drops others with it.
            if len(waiting) > 1:
                self._pulls_singly = True
                why = wire.escape_text(repr(error))
                log(
                    WARNING,
                    "fedpa: a node's answer can't be read (%s): each is now read alone",
                    why,
                )
                return self._pull(waiting)
            (node,) = waiting.values()
            return {node: wire.NodeError(f"its answer can't be read: {error!r}")}
        for message in messages:
            sender = waiting.get(message.metadata.reply_to_message_id)
            if sender is None:
                continue
            if message.has_error():
                answers[sender] = wire.NodeError(wire.describe_error(message.error))
            elif message.has_content():
                answers[sender] = message.content
            else:
                answers[sender] = wire.NodeError("its answer is empty")
        return answers

    def suspect(self, node: int) -> None:
        """Leave the node out until it replies again.

        Nodes that were excluded because of it are queried again, too.
        """
        self.sites.pop(node, None)
        self.excluded.clear()

    def holders(self) -> dict[str, int]:
        """client → the node that holds it now."""
        return {name: node for node, site in sorted(self.sites.items()) for name in site.sizes}

    def sizes(self) -> dict[str, int]:
        """Collect all clients of the connected nodes, with their numbers of examples."""
        return {name: n for site in self.sites.values() for name, n in site.sizes.items()}

    def wait(self, least: int, what: str) -> None:
        """Wait until `least` nodes, and all that are connected, have replied.

        After `start_timeout` seconds `least` nodes are enough. Raises FedpaError with the nodes'
        reasons if there are fewer; before the run has started, also as soon as `least` nodes are
        connected, all have replied and too few can take part. `what` starts the message.
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
        """Add a node that has replied, or exclude it."""
        name = f"node {node}"
        try:
            with wire.reading():
                said: Any = content.get(wire.CONFIG, {})
                name = wire.escape_text(said.get("name") or name, wire.LONGEST_NAME)
                sizes = self._read_sizes(wire.read_fields(wire.Introduction, content))
            self._make_room(node, name, sizes)
        except wire.WireError as error:
            self.excluded[node] = Excluded(f"{name} refused ({error})")
            log(ERROR, "fedpa: %s", self.excluded[node].reason)
        else:
            self.sites[node] = Site(name, sizes)
            log(INFO, "fedpa: %s holds %d clients", name, len(sizes))

    def _read_sizes(self, said: wire.Introduction) -> dict[str, int]:
        """Read the clients that a node reports, with their numbers of examples."""
        ids = said.clients
        if len(ids) != len(said.examples):
            raise wire.WireError("clients and examples must be lists of one length")
        for client, n in zip(ids, said.examples, strict=True):
            wire.check_client("", client)
            what = f"examples of client {wire.escape_text(client, 100)!r}"
            wire.check_count(what, n, self.connection.largest_client)
        if not ids or len(set(ids)) < len(ids):
            raise wire.WireError("must have at least one client, and each only once")
        return dict(zip(ids, said.examples, strict=True))

    def _make_room(self, node: int, name: str, sizes: Mapping[str, int]) -> None:
        """Refuse a node that has another's client, unless it has exactly the same ones.

        Before the start the run is refused, because the result would depend on which node replies
        first.

        A node with the same clients may have been restarted after a crash: Flower lists the old one
        for a minute. The old one is queried again, and refused if it still replies.
        """
        for other, theirs in list(self.sites.items()):
            both = sorted(sizes.keys() & theirs.sizes.keys())
            if not both or other == node:
                continue
            if sizes != theirs.sizes or self._replaced.get(other) == node:
                what = (
                    f"{name} and {theirs.name} both have client {both[0]!r}: a client's data must "
                    "be on one node"
                )
                raise wire.WireError(what) if self.started else FedpaError(what)
            what = f"{name} has the same clients as {theirs.name}, and replaces it"
            log(WARNING, "fedpa: %s (the old node is queried again)", what)
            self._replaced[node] = other
            self.suspect(other)
