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

from fedpa.engines.flower.examples_kind import LARGEST, from_text
from fedpa.engines.flower.exchange import pull, push
from fedpa.engines.flower.records import ABOUT, about
from fedpa.engines.flower.settings import Connection
from fedpa.errors import FedpaError


class Site(NamedTuple):
    """What a node told of itself."""

    name: str
    sizes: Mapping[str, int]
    kind: str
    """Of its examples, as a text."""


class Roster:
    """The nodes of a run, as far as is known now."""

    def __init__(self, grid: Grid, connection: Connection, shapes: Mapping[str, str]) -> None:
        self.grid, self.connection = grid, connection
        self.question = ConfigRecord({"shapes": json.dumps(dict(shapes))})
        self.sites: dict[int, Site] = {}
        """Nodes that have answered, and have not been silent since."""
        self.refused: dict[int, str] = {}
        """Nodes that can't take part, and why."""
        self._asked: dict[str, int] = {}
        self._told: set[str] = set()

    def refresh(self) -> None:
        """Look who is there. New nodes are asked; nodes that are gone are forgotten."""
        present = set(self.grid.get_node_ids())
        for gone in (self.sites.keys() | self.refused.keys()) - present:
            self.sites.pop(gone, None)
            self.refused.pop(gone, None)
        for node, answer in pull(self.grid, self._asked).items():
            self._asked = {name: who for name, who in self._asked.items() if who != node}
            if answer.content is None:
                continue  # asked again below, if it is there
            try:
                self._enter(node, answer.content)
            except FedpaError as error:
                self._refuse(node, str(error))
        self._asked = {name: node for name, node in self._asked.items() if node in present}
        known = self.sites.keys() | self.refused.keys() | set(self._asked.values())
        content = RecordDict({ABOUT: self.question})
        new = dict.fromkeys(sorted(present - known), content)
        if new:
            ttl = max(self.connection.start_timeout, self.connection.round_timeout)
            self._asked |= push(self.grid, new, MessageType.QUERY, "who", ttl)

    def suspect(self, node: int) -> None:
        """It left a message unanswered: it takes part again when it has told that it is there."""
        self.sites.pop(node, None)

    def holders(self) -> dict[str, int]:
        """client → the node that holds it now."""
        return {name: node for node, site in sorted(self.sites.items()) for name in site.sizes}

    def sizes(self) -> dict[str, int]:
        """All clients of the nodes that are there, and their numbers of examples."""
        return {name: n for site in self.sites.values() for name, n in site.sizes.items()}

    def wait_for(self, enough: Callable[[], Any], what: Callable[[], str]) -> None:
        """Until `enough()`; refused after `start_timeout` seconds."""
        deadline = time.monotonic() + self.connection.start_timeout
        while True:
            late = time.monotonic() > deadline
            self.refresh()
            if enough():
                return
            if late:
                raise FedpaError(f"{what()} ({self._about()})")
            time.sleep(self.connection.poll)

    def _about(self) -> str:
        waited = f"after start-timeout = {self.connection.start_timeout:g} s"
        here = len(self.sites) + len(self.refused)
        silent = len(set(self._asked.values()))
        text = f"{waited}: {here + silent} connected, {silent} have not answered"
        return text + "".join(f"; {reason}" for reason in self.refused.values())

    def _enter(self, node: int, content: RecordDict) -> None:
        said = about(content)
        name = str(said.get("name") or f"node {node}")
        if "error" in said:
            raise FedpaError(f"{name}: {said['error']!s}")
        site = checked_site(name, said)
        for other, theirs in list(self.sites.items()):
            both = sorted(site.sizes.keys() & theirs.sizes.keys())
            if other != node and site.sizes == theirs.sizes:
                # Started anew after a crash: Flower lists the old one for a minute.
                log(WARNING, "fedpa: %s takes the place of one that held the same clients", name)
                del self.sites[other]
            elif both and other != node:
                raise FedpaError(
                    f"{name} and {theirs.name} both hold client {both[0]!r}: a client's data must "
                    "be on one node"
                )
        kinds = {theirs.kind for theirs in self.sites.values()}
        if kinds and site.kind not in kinds:
            raise FedpaError(
                f"{name}: an example's arrays are {site.kind}: the others have {kinds.pop()}"
            )
        self.sites[node] = site
        if name not in self._told:
            log(INFO, "fedpa: %s holds %d clients", name, len(site.sizes))
            self._told.add(name)

    def _refuse(self, node: int, reason: str) -> None:
        self.refused[node] = reason
        log(ERROR, "fedpa: %s", reason)


def checked_site(name: str, said: Any) -> Site:
    """What a node said of its clients; refused where it makes no sense."""
    ids, sizes = said.get("clients"), said.get("examples")
    if not isinstance(ids, list) or not isinstance(sizes, list) or len(ids) != len(sizes):
        raise FedpaError(f"{name}: clients and examples must be lists of one length")
    for client, n in zip(ids, sizes, strict=True):
        if not isinstance(client, str) or not isinstance(n, int) or not 0 <= n <= LARGEST:
            raise FedpaError(
                f"{name}: client {client!r} has {n!r} examples: must be a whole number from 0 to "
                f"{LARGEST:,}"
            )
    if not ids or len(set(ids)) < len(ids):
        raise FedpaError(f"{name}: must hold at least one client, and each once")
    kind = str(said.get("kind"))
    from_text(kind)
    return Site(name, dict(zip(ids, sizes, strict=True)), kind)
