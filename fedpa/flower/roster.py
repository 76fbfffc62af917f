"""Which nodes are there, and which clients each holds.

A node that appears is asked, and takes part once it has answered; one that left a round unanswered
is asked again before it is given another. Nobody waits for that: rounds go on with the others.
"""

import json
import time
from collections.abc import Callable, Mapping
from logging import ERROR, INFO, WARNING
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

import fedpa
from fedpa.engines.execution import line
from fedpa.errors import FedpaError
from fedpa.flower.exchange import pull, push
from fedpa.flower.records import ABOUT, about
from fedpa.flower.settings import Connection

AGAIN = 5.0
"""Seconds after which a node that could not answer is asked again."""


class TwiceError(FedpaError):
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
        """Nodes that can't take part, and why."""
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
                self._unable[node] = (now + AGAIN, f"node {node}: {answer.failure}")
                continue
            try:
                self._enter(node, answer.content)
            except FedpaError as error:
                self._refuse(node, str(error))
                if isinstance(error, TwiceError):
                    self.twice[node] = str(error)
            except Exception as error:  # what a node sends is anybody's guess
                self._refuse(node, f"node {node}: the answer makes no sense: {line(error)}")
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

    def wait_for(self, least: int, what: Callable[[], str]) -> None:
        """Until so many nodes, and all that are connected, have told what they hold.

        After `start_timeout` seconds the first will do; if there are fewer, that is refused.
        """
        deadline = time.monotonic() + self.connection.start_timeout
        while True:
            late = time.monotonic() > deadline
            self.refresh()
            if len(self.sites) >= least and (late or not self.asked):
                return
            if late:
                raise FedpaError(f"{what()} ({self._about()})")
            time.sleep(self.connection.poll)

    def _about(self) -> str:
        reasons = [*self.refused.values(), *(why for _, why in self._unable.values())]
        silent = set(self.asked.values()) - self._unable.keys()
        here = len(self.sites) + len(reasons) + len(silent)
        waited = f"after start-timeout = {self.connection.start_timeout:g} s"
        text = f"{waited}: {here} connected, {len(silent)} have not answered"
        return text + "".join(f"; {reason}" for reason in reasons)

    def _enter(self, node: int, content: RecordDict) -> None:
        said = about(content)
        name = str(said.get("name") or f"node {node}")
        if "error" in said:
            raise FedpaError(f"{name}: {said['error']!s}")
        if said.get("kind") != self.kind:
            raise FedpaError(
                f"{name}: an example's arrays are {said.get('kind')!s}: on the server they are "
                f"{self.kind}"
            )
        sizes = checked_sizes(name, said, self.connection.largest_client)
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
        self._unable.pop(node, None)
        if name not in self._told:
            log(INFO, "fedpa: %s holds %d clients", name, len(sizes))
            self._told.add(name)

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        if reason not in self._told:
            log(ERROR, "fedpa: %s", reason)
            self._told.add(reason)


def checked_sizes(name: str, said: Any, largest: int) -> dict[str, int]:
    """What a node said of its clients; refused where it makes no sense."""
    ids, sizes = said.get("clients"), said.get("examples")
    if not isinstance(ids, list) or not isinstance(sizes, list) or len(ids) != len(sizes):
        raise FedpaError(f"{name}: clients and examples must be lists of one length")
    for client, n in zip(ids, sizes, strict=True):
        if not isinstance(client, str) or not isinstance(n, int) or not 0 <= n <= largest:
            raise FedpaError(
                f"{name}: client {client!r} has {n!r} examples: must be a whole number from 0 to "
                f"largest-client = {largest:,}"
            )
    if not ids or len(set(ids)) < len(ids):
        raise FedpaError(f"{name}: must hold at least one client, and each once")
    return dict(zip(ids, sizes, strict=True))
