"""The Flower engine: a round's clients on other machines.

Like every engine it is given a client update, an aggregation, a message and a cohort, and returns
the aggregate. The update runs where the clients are; here its phase is named, the message sent once
to each node that holds clients of the cohort, and their sums merged, in the order of the clients'
ids.
"""

import functools
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.supercore import log

from fedpa.algorithms.fedopt import Algorithm, ClientUpdate, Message
from fedpa.engines.engine import Cohort, Engine, Reports, RoundResult, Traffic, no_reports
from fedpa.engines.execution import raw_keys
from fedpa.flower import wire
from fedpa.flower.client import INQUIRY, reply_shapes
from fedpa.flower.roster import Roster
from fedpa.server.aggregation import Aggregation, all_finite, total_weight
from fedpa.types import Params

LOST = (
    "fedpa: round %d: %s has lost the states of %d of its clients (%r, …): they start again "
    "(a state-dir in its --node-config would have kept them)"
)


class RunFacts(NamedTuple):
    """What nodes, and checks of what they send, need to know of a run beside its algorithm."""

    example: Any
    """The shapes of an example's arrays."""
    weighting: str
    """What q_i is: "examples" or "uniform"."""
    population: float
    """Σ q_i of all clients, for methods that have to know."""
    run: str
    """Its name on the nodes, also after it is resumed."""
    floor: Callable[[int], int]
    """Before round t (from 0), the round that it may have to return to: that of its last checkpoint
    but one."""


def flower(algorithm: Algorithm, theta: Params, roster: Roster, facts: RunFacts) -> Engine:
    """An engine for one algorithm.

    What clients keep stays on the nodes: the state that the server has of one is the number of the
    round that its own is of (`with_tokens`).
    """
    updates = dict(algorithm.clients)
    if algorithm.inquiry is not None:
        updates[INQUIRY] = algorithm.inquiry.client
    keeps = keeps_state(algorithm, theta)
    merge, value = jax.jit(algorithm.aggregation.merge), jax.jit(algorithm.aggregation.value)
    finite = jax.jit(all_finite)
    weight_of = jax.jit(lambda total: algorithm.aggregation.value(total).weight)
    weight = functools.partial(total_weight, facts.weighting)

    @functools.cache
    def expect(phase: str) -> wire.Expected:
        total, infos = reply_shapes(algorithm, theta, phase, facts.example)
        return wire.Expected(total, infos, weight_of, weight)

    def run(
        client: ClientUpdate, aggregation: Aggregation, message: Message, cohort: Cohort
    ) -> RoundResult:
        phase = next(name for name, update in updates.items() if update is client)
        expected, t = expect(phase), cohort.round
        roster.refresh()
        if not roster.sites:
            roster.wait_for_any(t + 1)
        holders = roster.holders()
        sizes = dict(zip(cohort.ids, cohort.sizes, strict=True))
        parts: dict[int, list[str]] = {}
        failures = {}
        for name in sorted(sizes):
            if name in holders:
                parts.setdefault(holders[name], []).append(name)
            else:
                failures[name] = "no connected node holds it"
        records = wire.pack(message)
        keys = dict(zip(cohort.ids, raw_keys(cohort).tolist(), strict=True))
        contents = {}
        for node, ids in parts.items():
            asked: dict[str, Any] = {
                "phase": phase,
                "round": t,
                "clients": ids,
                "keys": [word for name in ids for word in keys[name]],
                "population": facts.population,
            }
            if keeps and phase != INQUIRY:
                asked["states"] = [int(cohort.states[name]) for name in ids]
                asked |= {"run": facts.run, "floor": facts.floor(t)}
            contents[node] = RecordDict({**records, wire.CONFIG: ConfigRecord(asked)})
        sites = {node: roster.sites[node] for node in parts}
        answers = roster.exchange(contents, str(t + 1))

        def refuse(node: int, why: object) -> None:
            name = sites[node].name
            failures.update(dict.fromkeys(parts[node], f"{name}: {why}"))
            log(WARNING, "fedpa: round %d: %s: %s", t + 1, name, why)

        # Where no client counts, the sum is 0 and its weight, too: the server skips the round.
        total = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), expected.total)
        replies: dict[int, wire.Reply] = {}
        for node, ids in parts.items():  # by first ids: the same order every time
            try:
                with wire.reading():
                    answer = answers[node]
                    if isinstance(answer, wire.NodeError):
                        raise answer
                    reply = wire.read_reply(answer, expected, {name: sizes[name] for name in ids})
            except wire.WireError as error:
                refuse(node, error)
                # Unless it has been restarted meanwhile, and has said what it holds.
                if isinstance(error, wire.NodeError) and roster.sites.get(node) is sites[node]:
                    roster.suspect(node)
                continue
            if reply.lost:
                log(WARNING, LOST, t + 1, sites[node].name, len(reply.lost), reply.lost[0])
            if any(reply.accepted):
                merged = merge(total, reply.total)
                if not finite(merged):
                    refuse(node, "its sum is too large: with the others' it is not finite")
                    continue
                total = merged
            replies[node] = reply
            mine = set(ids)
            failures |= {name: text for name, text in reply.failures.items() if name in mine}
        up = sum(wire.count_bytes(a) for a in answers.values() if isinstance(a, RecordDict))
        down = sum(wire.count_bytes(content) for content in contents.values())
        reports = _gather(cohort, sizes, parts, replies, keeps)
        return RoundResult(value(total), *reports, failures, up // len(sizes), Traffic(up, down))

    return run


def keeps_state(algorithm: Algorithm, theta: Params) -> bool:
    """Whether clients keep anything between rounds."""
    return bool(jax.tree.leaves(jax.eval_shape(algorithm.client_init, theta)))


def with_tokens(algorithm: Algorithm, theta: Params) -> Algorithm:
    """The algorithm as the server's loop runs it: of a client's state it keeps the round."""
    if not keeps_state(algorithm, theta):
        return algorithm
    return algorithm._replace(client_init=lambda theta: np.int32(0))


def _gather(
    cohort: Cohort,
    sizes: Mapping[str, int],
    parts: Mapping[int, list[str]],
    replies: Mapping[int, wire.Reply],
    keeps: bool,
) -> Reports:
    place = {name: index for index, name in enumerate(cohort.ids)}
    reports = no_reports(cohort)
    for node, reply in replies.items():
        members = [place[name] for name in parts[node]]
        reports.accepted[members] = reply.accepted
        reports.examples[members] = [sizes[name] for name in parts[node]]
        for name, values in reply.infos.items():
            reports.infos.setdefault(name, np.full(len(place), np.nan))[members] = values
    if keeps:
        done = np.int32(cohort.round + 1)
        accepted = zip(cohort.ids, reports.accepted, strict=True)
        reports.states.update({name: done for name, ok in accepted if ok})
    return reports
