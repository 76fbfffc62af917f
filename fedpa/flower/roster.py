"""The nodes of a run: which are connected, which clients each holds, messages to them.

A node that appears is asked, and takes part once it has answered; one that left a round unanswered
is asked again before it is sent another. No round waits for that.
"""

import json
import time
from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

import fedpa
from fedpa.errors import FedpaError
from fedpa.flower import wire
from fedpa.flower.settings import Connection

AGAIN = 5.0
"""Seconds after which a node that could not answer is asked again."""
LOOK = 1.0
"""Seconds between looks for nodes that appear, while a round's answers are waited for."""
LONGEST_NAME = 200
"""Characters of a node's name, and of a client's id."""
REASONS = 5
"""Nodes whose reasons are given when a run can't start."""


class TwiceError(wire.WireError):
    """Two nodes hold one client."""


class Site(NamedTuple):
    """What a node said about itself."""

    name: str
    sizes: Mapping[str, int]


class Roster:
    """The nodes of a run, as far as is known now."""

    def __init__(
        self, grid: Grid, connection: Connection, shapes: Mapping[str, str], kind: str
    ) -> None:
        """`shapes`: of what clients are sent; `kind`: of an example, as a text."""
        self.grid, self.connection, self.kind = grid, connection, kind
        asked: dict[str, Any] = {"shapes": json.dumps(shapes), "version": fedpa.__version__}
        self.question = RecordDict({wire.CONFIG: ConfigRecord(asked)})
        self.sites: dict[int, Site] = {}
        """Nodes that have answered, and have not been silent since."""
        self.refused: dict[int, str] = {}
        """Nodes that can't take part → their names and why."""
        self.twice: dict[int, str] = {}
        """Those of them that hold another node's client."""
        self.asked: dict[str, int] = {}
        """Questions that have no answer yet → node."""
        self._unable: dict[int, tuple[float, str]] = {}
        self._replaced: dict[int, int] = {}
        self._logged: set[str] = set()

    def refresh(self) -> None:
        """See which nodes are connected. New ones are asked; those that are gone are forgotten."""
        present = set(self.grid.get_node_ids())
        for gone in self.sites.keys() - present:
            self.suspect(gone)
        for known in (self.refused, self.twice, self._unable):
            for gone in known.keys() - present:
                del known[gone]
        now = time.monotonic()
        for node, answer in self._pull(self.asked).items():
            self.asked = {name: other for name, other in self.asked.items() if other != node}
            if isinstance(answer, wire.NodeError):
                self._unable[node] = (now + AGAIN, f"node {node} failed ({answer})")
            else:
                self._unable.pop(node, None)
                self._meet(node, answer)
        self.asked = {name: node for name, node in self.asked.items() if node in present}
        busy = self.sites.keys() | self.refused.keys() | set(self.asked.values())
        busy |= {node for node, (later, _) in self._unable.items() if later > now}
        new = dict.fromkeys(sorted(present - busy), self.question)
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
        unsent = set(contents) - set(waiting.values())
        answers: dict[int, RecordDict | wire.NodeError] = {
            node: wire.NodeError("the message could not be sent") for node in unsent
        }
        while waiting:
            answers |= self._pull(waiting)
            waiting = {name: node for name, node in waiting.items() if node not in answers}
            now = time.monotonic()
            if waiting and now >= looked + LOOK:
                self.refresh()
                looked = now
            if waiting and now > began + timeout:
                break
            if waiting:
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
        found: dict[int, RecordDict | wire.NodeError] = {}
        for message in self.grid.pull_messages(list(waiting)) if waiting else ():
            node = waiting.get(message.metadata.reply_to_message_id)
            if node is not None:
                error = message.has_error()
                found[node] = (
                    wire.NodeError(wire.describe_error(message.error)) if error else message.content
                )
        return found

    def suspect(self, node: int) -> None:
        """Leave the node out until it has answered again.

        What others were refused for may have been because of it: they are asked again, too.
        """
        site = self.sites.pop(node, None)
        if site is not None:
            self._logged.discard(site.name)
        self.refused.clear()
        self.twice.clear()

    def holders(self) -> dict[str, int]:
        """client → the node that holds it now."""
        return {name: node for node, site in sorted(self.sites.items()) for name in site.sizes}

    def sizes(self) -> dict[str, int]:
        """All clients of the connected nodes, and their numbers of examples."""
        return {name: n for site in self.sites.values() for name, n in site.sizes.items()}

    def wait_to_start(self) -> None:
        """Wait until `min_nodes` nodes, and all that are connected, have said what they hold.

        After `start_timeout` seconds `min_nodes` are enough. If there are fewer then, or as soon as
        that many are connected, all have answered and too few can take part, raises FedpaError with
        the nodes' reasons.
        """
        least = self.connection.min_nodes
        self._wait(least, f"min-nodes = {least}, but", at_start=True)

    def wait_for_any(self, t: int) -> None:
        """Wait until a node can take part in round t, for at most `start_timeout` seconds."""
        self._wait(1, f"round {t}:", at_start=False)

    def _wait(self, least: int, what: str, at_start: bool) -> None:
        deadline = time.monotonic() + self.connection.start_timeout
        while True:
            late = time.monotonic() > deadline
            self.refresh()
            if len(self.sites) >= least and (late or not self.asked):
                return
            if late or (at_start and self._all_answered(least)):
                after = (
                    f" after start-timeout = {self.connection.start_timeout:g} s" if late else ""
                )
                raise FedpaError(f"{what} {self._count_nodes(after)}")
            time.sleep(self.connection.poll)

    def _all_answered(self, least: int) -> bool:
        """Whether enough nodes are connected, and none of them may still answer otherwise."""
        return not (self.asked or self._unable) and len(self.sites) + len(self.refused) >= least

    def _count_nodes(self, after: str) -> str:
        reasons = {node: f"node {node} has not answered" for node in self.asked.values()}
        reasons |= {node: why for node, (_, why) in self._unable.items()} | self.refused
        here = len(self.sites.keys() | reasons.keys())
        text = f"{len(self.sites)} of {here} connected nodes can take part{after}"
        shown = list(reasons.values())[:REASONS]
        if len(reasons) > REASONS:
            shown.append(f"and {len(reasons) - REASONS} more")
        return f"{text}: {', '.join(shown)}" if shown else text

    def _meet(self, node: int, content: RecordDict) -> None:
        """Enter a node that has answered, or refuse it."""
        name = f"node {node}"
        try:
            with wire.reading():
                said = wire.read_config(content)
                name = wire.escape_text(said.get("name") or name, LONGEST_NAME)
                self._enter(node, name, said)
        except wire.WireError as error:
            self.refused[node] = reason = f"{name} refused ({error})"
            self._log_once(ERROR, reason, reason)
            if isinstance(error, TwiceError):
                self.twice[node] = str(error)

    def _enter(self, node: int, name: str, said: ConfigRecord) -> None:
        if "error" in said:
            raise wire.WireError(str(said["error"]))
        if said.get("kind") != self.kind:
            kind = wire.escape_text(said.get("kind"), 150)
            raise wire.WireError(
                f"an example's arrays are {kind}: on the server they are {self.kind}"
            )
        sizes = read_sizes(said, self.connection.largest_client)
        for other, theirs in list(self.sites.items()):
            both = sorted(sizes.keys() & theirs.sizes.keys())
            if not both or other == node:
                continue
            if sizes != theirs.sizes or self._replaced.get(other) == node:
                raise TwiceError(
                    f"{name} and {theirs.name} both hold client {both[0]!r}: a client's data must "
                    "be on one node"
                )
            # It may have been restarted after a crash: Flower lists the old one for a minute. That
            # one is asked again; if it is still there, it is the one that is refused.
            what = f"{name} holds the same clients as {theirs.name}, and replaces it"
            log(WARNING, "fedpa: %s (which is asked whether it is still there)", what)
            self._replaced[node] = other
            self.suspect(other)
        self.sites[node] = Site(name, sizes)
        self._log_once(INFO, name, f"{name} holds {len(sizes)} clients")

    def _log_once(self, level: int, key: str, text: str) -> None:
        if key not in self._logged:
            log(level, "fedpa: %s", text)
            self._logged.add(key)


def read_sizes(said: Any, largest: int) -> dict[str, int]:
    """The clients that a node says it holds, with their numbers of examples."""
    ids, sizes = said.get("clients"), said.get("examples")
    if not isinstance(ids, list) or not isinstance(sizes, list) or len(ids) != len(sizes):
        raise wire.WireError("clients and examples must be lists of one length")
    for client, n in zip(ids, sizes, strict=True):
        shown = wire.escape_text(client, 100)
        wire.check_count(f"examples of client {shown!r}", n, largest)
        if client != wire.escape_text(client, LONGEST_NAME):  # it will be in logs and files
            raise wire.WireError(
                f"client {shown!r}: an id must be at most {LONGEST_NAME} printable characters"
            )
    if not ids or len(set(ids)) < len(ids):
        raise wire.WireError("must hold at least one client, and each once")
    return dict(zip(ids, sizes, strict=True))
