"""Which nodes are there, and which clients each holds.

A node that appears is asked, and takes part once it has answered; one that left a round unanswered
is asked again before it is given another. Nobody waits for that: rounds go on with the others.
"""

import json
import time
from collections.abc import Mapping
from logging import ERROR, INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

import fedpa
from fedpa.engines.execution import line
from fedpa.errors import FedpaError
from fedpa.flower.exchange import pull, push
from fedpa.flower.records import ABOUT, WireError, about, escape_text
from fedpa.flower.settings import Connection

AGAIN = 5.0
"""Seconds after which a node that could not answer is asked again."""


LONGEST_NAME = 200
"""Characters of a node's name, and of a client's id."""
REASONS = 5
"""Nodes whose reasons are given when a run can't start."""


class TwiceError(WireError):
    """Two nodes hold one client."""


class Site(NamedTuple):
    """What a node told of itself."""

    name: str
    sizes: Mapping[str, int]


class Roster:
    """The nodes of a run, as far as is known now."""

    def __init__(
        self, grid: Grid, connection: Connection, shapes: Mapping[str, str], kind: str
    ) -> None:
        """`shapes`: of what clients are sent; `kind`: of an example, as a text."""
        self.grid, self.connection, self.kind = grid, connection, kind
        self.question = ConfigRecord(
            {"shapes": json.dumps(dict(shapes)), "version": fedpa.__version__}
        )
        self.sites: dict[int, Site] = {}
        """Nodes that have answered, and have not been silent since."""
        self.refused: dict[int, str] = {}
        """Nodes that can't take part, by name and why."""
        self.asked: dict[str, int] = {}
        """Questions that have no answer yet → whom."""
        self.twice: dict[int, str] = {}
        """Those of them that hold another's client."""
        self._unable: dict[int, tuple[float, str]] = {}
        self._replaced: dict[int, int] = {}
        self._told: set[str] = set()

    def refresh(self) -> None:
        """Look who is there. New nodes are asked; nodes that are gone are forgotten."""
        present = set(self.grid.get_node_ids())
        for gone in self.sites.keys() - present:
            self.suspect(gone)
        for kept in (self.refused, self.twice, self._unable):
            for gone in kept.keys() - present:
                del kept[gone]
        now = time.monotonic()
        for node, answer in pull(self.grid, self.asked).items():
            self.asked = {name: who for name, who in self.asked.items() if who != node}
            if answer.content is None:
                self._unable[node] = (now + AGAIN, f"node {node} failed ({answer.failure})")
                continue
            self._unable.pop(node, None)
            name = f"node {node}"
            try:
                said = about(answer.content)
                name = escape_text(said.get("name") or name, LONGEST_NAME)
                self._enter(node, name, said)
            except WireError as error:
                self._refuse(node, f"{name} refused ({error})")
                if isinstance(error, TwiceError):
                    self.twice[node] = str(error)
            except Exception as error:  # what a node sends is anybody's guess
                why = escape_text(f"the answer makes no sense: {line(error)}")
                self._refuse(node, f"{name} refused ({why})")
        self.asked = {name: node for name, node in self.asked.items() if node in present}
        known = self.sites.keys() | self.refused.keys() | set(self.asked.values())
        known |= {node for node, (later, _) in self._unable.items() if later > now}
        content = RecordDict({ABOUT: self.question})
        new = dict.fromkeys(sorted(present - known), content)
        if new:
            ttl = max(self.connection.start_timeout, self.connection.round_timeout)
            self.asked |= push(self.grid, new, MessageType.QUERY, "who", ttl)

    def suspect(self, node: int) -> None:
        """It is not what it was: it takes part again when it has told that it is there.

        Nor is what others were refused for, if that was because of it.
        """
        site = self.sites.pop(node, None)
        if site is not None:
            self._told.discard(site.name)  # it is told again when it is back
        self.refused.clear()
        self.twice.clear()

    def holders(self) -> dict[str, int]:
        """client → the node that holds it now."""
        return {name: node for node, site in sorted(self.sites.items()) for name in site.sizes}

    def sizes(self) -> dict[str, int]:
        """All clients of the nodes that are there, and their numbers of examples."""
        return {name: n for site in self.sites.values() for name, n in site.sizes.items()}

    def wait_to_start(self) -> None:
        """Wait until `min_nodes` nodes, and all that are connected, have told what they hold.

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

    def _enter(self, node: int, name: str, said: ConfigRecord) -> None:
        if "error" in said:
            raise WireError(str(said["error"]))
        if said.get("kind") != self.kind:
            kind = escape_text(said.get("kind"), 150)
            raise WireError(f"an example's arrays are {kind}: on the server they are {self.kind}")
        sizes = checked_sizes(said, self.connection.largest_client)
        for other, theirs in list(self.sites.items()):
            both = sorted(sizes.keys() & theirs.sizes.keys())
            if not both or other == node:
                continue
            if sizes == theirs.sizes and self._replaced.get(other) != node:
                # Started anew after a crash, perhaps: Flower lists the old one for a minute. It
                # is asked again; if it is there still, it is the one that is refused.
                told = f"{name} holds the same clients as {theirs.name}, and replaces it"
                log(WARNING, "fedpa: %s (which is asked whether it is there still)", told)
                self._replaced[node] = other
                self.suspect(other)
            else:
                raise TwiceError(
                    f"{name} and {theirs.name} both hold client {both[0]!r}: a client's data must "
                    "be on one node"
                )
        self.sites[node] = Site(name, sizes)
        if name not in self._told:
            log(INFO, "fedpa: %s holds %d clients", name, len(sizes))
            self._told.add(name)

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        if reason not in self._told:
            log(ERROR, "fedpa: %s", reason)
            self._told.add(reason)


def checked_sizes(said: Any, largest: int) -> dict[str, int]:
    """What a node said of its clients; refused where it makes no sense."""
    ids, sizes = said.get("clients"), said.get("examples")
    if not isinstance(ids, list) or not isinstance(sizes, list) or len(ids) != len(sizes):
        raise WireError("clients and examples must be lists of one length")
    for client, n in zip(ids, sizes, strict=True):
        if not isinstance(client, str) or not isinstance(n, int) or not 0 <= n <= largest:
            raise WireError(
                f"client {escape_text(client, 100)!r} has {n!r} examples: must be a whole number "
                f"from 0 to largest-client = {largest:,}"
            )
        if client != escape_text(client, LONGEST_NAME):  # it will be in logs and files
            raise WireError(
                f"client {escape_text(client, 100)!r}: an id must be at most {LONGEST_NAME} "
                "printable characters"
            )
    if not ids or len(set(ids)) < len(ids):
        raise WireError("must hold at least one client, and each once")
    return dict(zip(ids, sizes, strict=True))
