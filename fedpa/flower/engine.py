"""The Flower engine: a round's clients on other machines.

Like every engine it is given a client update, an aggregation, a message and a cohort, and gives
back the aggregate. The update runs where the clients are; here its phase is named, the message
sent once to each node that holds clients of the cohort, and their sums merged, in the order of the
clients' ids.
"""

from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, Reports, RoundResult, Traffic
from fedpa.engines.execution import line, raw_keys
from fedpa.flower.exchange import Answer, exchanged
from fedpa.flower.node import INQUIRY, Sent, sent_shapes
from fedpa.flower.records import ABOUT, WireError, num_bytes, packed
from fedpa.flower.replies import Reply, Unable, checked
from fedpa.flower.roster import Roster
from fedpa.server.aggregation import Aggregation, all_finite
from fedpa.types import Params

LOST = (
    "fedpa: round %d: %s has lost what %d of its clients (%r, …) kept: they begin anew "
    "(a state-dir in its --node-config would have kept it)"
)


class Told(NamedTuple):
    """What nodes, and checks of what they send, need to know of a run beside its algorithm."""

    kind: Any
    """The shapes of an example's arrays."""
    weighting: str
    """What q_i is: "examples" or "uniform"."""
    population: float
    """Σ q_i of all clients, for methods that have to know."""
    run: str
    """A name of its own, which it keeps when it is gone on with."""
    floor: Callable[[int], int]
    """Before round t (from 0), the round that it may have to go back to: that of its last
    checkpoint but one."""


def flower(algorithm: Algorithm, theta: Params, roster: Roster, told: Told) -> Engine:
    """An engine for one algorithm.

    What clients keep stays on the nodes: the state the server has of one is the number of the round
    that its own is of (`with_tokens`).
    """
    phases = {id(client): phase for phase, client in algorithm.clients.items()}
    if algorithm.inquiry is not None:
        phases[id(algorithm.inquiry.client)] = INQUIRY
    keeps = bool(jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)))
    merge, value = jax.jit(algorithm.aggregation.merge), jax.jit(algorithm.aggregation.value)
    finite = jax.jit(all_finite)
    weight_of = jax.jit(lambda total: algorithm.aggregation.value(total).weight)
    connection = roster.connection
    templates: dict[str, Sent] = {}

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        phase, t = phases[id(client)], cohort.round
        if phase not in templates:
            templates[phase] = sent_shapes(algorithm, theta, phase, told.kind)
        template = templates[phase]
        sizes = dict(zip(cohort.ids, cohort.sizes, strict=True))
        roster.refresh()
        if not roster.sites:
            roster.wait_for_any(t + 1)
        holders = roster.holders()
        parts: dict[int, list[str]] = {}
        failures = {}
        for name in sorted(sizes):
            if name in holders:
                parts.setdefault(holders[name], []).append(name)
            else:
                failures[name] = "no node that is there holds it"
        records = packed(message)
        keys = dict(zip(cohort.ids, raw_keys(cohort).tolist(), strict=True))
        contents = {}
        for node, ids in parts.items():
            asked: dict[str, Any] = {
                "phase": phase,
                "round": t,
                "clients": ids,
                "keys": [word for name in ids for word in keys[name]],
                "population": told.population,
            }
            if keeps and phase != INQUIRY:
                asked["states"] = [int(cohort.states[name]) for name in ids]
                asked |= {"run": told.run, "floor": told.floor(t)}
            contents[node] = RecordDict({**records, ABOUT: ConfigRecord(asked)})
        sites = {node: roster.sites[node] for node in parts}
        names = {node: site.name for node, site in sites.items()}
        # Nodes that appear meanwhile tell what they hold, and are in the next round.
        answers = exchanged(
            roster.grid,
            contents,
            MessageType.TRAIN,
            str(t + 1),
            connection.round_timeout,
            connection.poll,
            roster.refresh,
        )
        replies = {}

        def refuse(node: int, why: str) -> None:
            failures.update(dict.fromkeys(parts[node], f"{names[node]}: {why}"))
            log(WARNING, "fedpa: round %d: %s: %s", t + 1, names[node], why)

        for node, ids in parts.items():
            try:
                mine = {name: sizes[name] for name in ids}
                replies[node] = _reply(answers[node], template, weight_of, mine, told.weighting)
            except WireError as error:
                refuse(node, str(error))
                # Unless it has been started anew meanwhile, and has told what it holds.
                if isinstance(error, Unable) and roster.sites.get(node) is sites[node]:
                    roster.suspect(node)
        up = sum(num_bytes(a.content) for a in answers.values() if a.content is not None)
        down = sum(num_bytes(content) for content in contents.values())
        # Where nobody counts, the sum is 0 and its weight, too: the server skips the round.
        total = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), template.total)
        for node, reply in list(replies.items()):  # by first ids: the same order every time
            if reply.lost:
                log(WARNING, LOST, t + 1, names[node], len(reply.lost), reply.lost[0])
            if not any(reply.accepted.values()):
                continue
            merged = merge(total, reply.total)
            if finite(merged):
                total = merged
            else:
                refuse(node, "its sum is too large: with the others' it is not finite")
                del replies[node]
        reports = _reports(cohort, sizes, parts, replies, failures, keeps, t)
        traffic = Traffic(up, down)
        return RoundResult(value(total), *reports, failures, up // len(sizes), traffic)

    return run


def with_tokens(algorithm: Algorithm, theta: Params) -> Algorithm:
    """The algorithm as the server's loop runs it: of a client's state it keeps the round."""
    if not jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)):
        return algorithm
    return algorithm._replace(client_init=lambda theta: np.int32(0))


def _reply(
    answer: Answer,
    template: Sent,
    weight_of: Callable[[Any], Any],
    sizes: Mapping[str, int],
    weighting: str,
) -> Reply:
    if answer.content is None:
        raise Unable(answer.failure)
    try:
        total, names = template
        return checked(answer.content, total, weight_of, sizes, weighting, names)
    except WireError:
        raise
    except Exception as error:  # what a node sends is anybody's guess
        raise WireError(f"the answer makes no sense: {line(error)}") from None


def _reports(
    cohort: Cohort,
    sizes: Mapping[str, int],
    parts: Mapping[int, list[str]],
    replies: Mapping[int, Reply],
    failures: dict[str, str],
    keeps: bool,
    t: int,
) -> Reports:
    place = {name: index for index, name in enumerate(cohort.ids)}
    accepted, examples = np.zeros(len(place), bool), np.zeros(len(place), np.int64)
    infos: dict[str, np.ndarray] = {}
    for node, reply in replies.items():
        ids = parts[node]
        members = [place[name] for name in ids]
        accepted[members] = [reply.accepted[name] for name in ids]
        examples[members] = [sizes[name] for name in ids]
        for name, values in reply.infos.items():
            infos.setdefault(name, np.full(len(place), np.nan))[members] = values
        failures |= {name: text for name, text in reply.failures.items() if name in ids}
    states = {name: cohort.states[name] for name in cohort.ids}
    if keeps:
        done = np.int32(t + 1)
        states |= {name: done for name, ok in zip(cohort.ids, accepted, strict=True) if ok}
    return Reports(infos, accepted, examples, states)
