"""A node's reply that was damaged or lies is refused as a whole, and no other node's with it."""

import copy
import functools
import json
import random
import tracemalloc

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import jax
import jax.numpy as jnp
import optax
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

import fedpa
from fedpa.engines.engine import Cohort
from fedpa.flower import client_app, make_node, make_run, server
from fedpa.flower.client import describe_node
from fedpa.flower.roster import Connection, Roster
from fedpa.metrics.metric import Counts, Metric
from fedpa.objectives import least_squares
from fedpa.training.problem import Problem, prepare
from tests.federations import least_squares_clients
from tests.flower.loopback_grid import LoopbackGrid, capture
from tests.fuzz.mutations import NAMES, change_bytes

CLIENTS = fedpa.data.from_mapping(least_squares_clients(sizes=(8, 8, 8, 8)))
METRIC = Metric(
    lambda params, batch: Counts({"examples": jnp.ones(len(batch["y"]))}), lambda sums: sums
)
PROBLEM = Problem(CLIENTS, lambda key: jnp.zeros(3), least_squares.loss, METRIC, CLIENTS)
LOCAL = fedpa.LocalTraining(optax.sgd(0.05), batch_size=4, epochs=3)
METHODS = {
    "fedpa": fedpa.fedpa(LOCAL, fedpa.Server(optax.sgd(1.0)), rho=0.1, burn_in_rounds=0),
    "scaffold": fedpa.scaffold(LOCAL, fedpa.Server(optax.sgd(1.0))),
    "private": fedpa.private(
        fedpa.fedavg(LOCAL, fedpa.Server(optax.sgd(1.0), weighting="uniform")),
        clip=1.0,
        noise_multiplier=1.0,
        delta=0.1,
    ),
}
LIAR, HONEST = 101, 102
MEMORY = 2**26
"""Bytes of NumPy and Python that reading a reply of a few kilobytes may take."""
SCALARS = (0, -1, 2**63 - 1, -(2**63), 0.5, float("nan"), float("inf"), 1e308, True, False, b"\xff")
TEXTS = tuple(name for name in NAMES if name != "\ud800")  # which Flower can't send
LISTS = ([], *([value] * k for value in (*SCALARS, "text") for k in (1, 2, 3)))
VALUES = (*SCALARS, *TEXTS, *LISTS, list(TEXTS))
DTYPES = ("float64", "float16", "int32", "complex64", "bool", "S5", "U5")


class LyingGrid(LoopbackGrid):
    """Replies that were made once; `change` mutates the liar's.

    They are read as Flower does: of a tree of objects, each some bytes. `damage` mutates these.
    """

    def __init__(self, app, nodes):
        super().__init__(app, {}, nodes)
        self.made, self.change, self.damage = {}, None, None
        self.honest = app
        self.app = self.answer

    def answer(self, message, context):
        node, kind = context.node_id, message.metadata.message_type
        if (node, kind) not in self.made:
            reply = self.honest(message, context)
            assert not reply.has_error()
            self.made[node, kind] = reply.content
        content = copy.deepcopy(self.made[node, kind])
        if node == LIAR and self.change is not None:
            content = self.change(kind, content)
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        return reply

    def join(self, node, config):
        self.contexts[node] = Context(1, node, config, RecordDict(), self.run_config)

    def pull_messages(self, message_ids):
        """One after the other, as Flower does: those before one that can't be read are lost."""
        pull = super().pull_messages
        return [self.inflate(message) for name in message_ids for message in pull([name])]

    def inflate(self, message):
        if self.damage is None or message.metadata.src_node_id != LIAR:
            return message
        objects = get_all_nested_objects(message)
        contents = {name: one.deflate() for name, one in objects.items()}
        own = message.metadata.reply_to_message_id
        whole = inflate_object_from_contents(message.object_id, self.damage(contents))
        assert isinstance(whole, Message)
        whole.metadata.__dict__["_reply_to_message_id"] = own
        return whole


def change_record(kind, content, draw):
    """The content of a message with one change."""
    how = draw.choice(["field", "field", "field", "array", "array", "metric", "record"])
    config = content["config"]
    if how == "record":
        return change_records(content, draw)
    if how == "field" or "arrays" not in content:
        name = draw.choice([*config, "error", "lost", "failed", "reasons", "states", "unknown"])
        if draw.randrange(8) == 0 and name in config:
            del config[name]
        elif isinstance(config.get(name), list) and draw.randrange(2):
            config[name] = change_list(config[name], draw)
        else:
            config[name] = draw.choice(VALUES)
    elif how == "array" or "metrics" not in content:
        change_array(content["arrays"], draw)
    else:
        metrics = content["metrics"]
        name = draw.choice([*metrics, *TEXTS[:3], "unknown"])
        values = [[], [0.5], [1, 2], [float("nan"), 0.5], [1e308] * 2, 3, -1.0, [1.0] * 99]
        if draw.randrange(4) == 0:
            metrics.pop(name, None)
        else:
            metrics[name] = draw.choice(values)
    return content


def change_list(values, draw):
    values = list(values)
    at, how = draw.randrange(len(values)), draw.randrange(4)
    if how == 0:
        return values[:at]
    if how == 1:
        return values + values[at:]
    if how == 2:
        return values[::-1]
    kind = type(values[at])
    values[at] = draw.choice([v for v in (*SCALARS, *TEXTS) if type(v) is kind])
    return values


def change_records(content, draw):
    name = draw.choice(["arrays", "config", "metrics"])
    kinds = [ConfigRecord({"a": 1}), MetricRecord({"a": 1.0}), ArrayRecord({}), None, "as text"]
    new = draw.choice(kinds)
    records = dict(content)
    if new is None:
        records.pop(name, None)
    elif new == "as text":  # numbers as a record that may have text
        values = records.get("metrics", {})
        records["metrics"] = ConfigRecord({k: ["0.5"] * 2 for k in values} or {"loss": ["a"] * 2})
    else:
        records[draw.choice([name, *TEXTS[:3]])] = new
    return RecordDict(records)


def change_array(arrays, draw):
    name = draw.choice(list(arrays))
    value, how = arrays[name].numpy(), draw.randrange(9)
    if how == 0:
        value = np.full_like(value, draw.choice([np.nan, np.inf, -np.inf, 3e38]))
    elif how == 1:
        with np.errstate(all="ignore"):
            value = value.astype(draw.choice(DTYPES))
    elif how == 2:
        value = draw.choice([value.reshape(-1, 1), value[None], np.zeros(0, value.dtype)])
    elif how == 3:
        del arrays[name]
        return
    elif how == 4:
        name = draw.choice(TEXTS)
    elif how == 5:
        value = np.array([draw.random() * 1e3] * value.size, value.dtype).reshape(value.shape)
    else:
        array = arrays[name]
        data = change_bytes(array.data, draw)
        if how == 6:
            shape = draw.choice([b"(99999999999,)", b"(2**62,)", b"(-1,)", b"(1,)" * 500])
            data = array.data.replace(repr(value.shape).encode(), shape)
        stype = draw.choice(["numpy.ndarray"] * 5 + ["pickle", ""])
        arrays[name] = Array(array.dtype, tuple(array.shape), stype, data)
        return
    arrays[name] = Array(value)


def change_objects(contents, draw):
    """The objects of a message, of which one has other bytes or another JSON."""
    name = draw.choice(list(contents))
    head, zero, body = contents[name].partition(b"\0")
    if body.startswith(b"{") and draw.randrange(2):
        changed = json.loads(body)
        key = draw.choice(list(changed))
        changed[key] = draw.choice([0, -1, [], [0] * 1000, [5], "x", None, {}, {"a": 1}, 1e9])
        body = json.dumps(changed).encode()
        head = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()])
        contents[name] = head + zero + body
    else:
        contents[name] = change_bytes(contents[name], draw)
    return contents


@functools.cache
def deployment(name, out):
    """(grid, roster, engine of the server, cohort and message of a round)."""
    method = METHODS[name]
    served = make_run(PROBLEM, method, rounds=9, clients_per_round=4)
    node = make_node(PROBLEM, method)
    app = client_app(lambda settings, holding: node)
    grid = LyingGrid(app, [{"partition-id": k, "num-partitions": 2} for k in range(2)])
    connection = Connection(start_timeout=0.2, round_timeout=0.2, poll=0.01)
    roster = Roster(grid, connection, describe_node(make_node(served.problem, method)))
    roster.wait(2, "")
    start = server.RunStart("5eed", roster.sizes())
    algorithm, theta, *_ = prepare(PROBLEM.objective, jnp.zeros(3), CLIENTS, method, 9)
    (out / name).mkdir()
    told, engine = server.flower(roster, served, start, out / name, algorithm, theta)
    state = told.init(theta)
    keys = jax.random.split(jax.random.key(0), 4)
    states = {name: told.client_init(theta) for name in CLIENTS.ids}
    sizes = [CLIENTS.num_examples(name) for name in CLIENTS.ids]
    cohort = Cohort(list(CLIENTS.ids), CLIENTS.examples, keys, states, sizes)
    message = told.broadcast(state, 0)
    client = told.clients[told.phase(0)]

    def play():
        return engine(client, told.aggregation, message, cohort)

    return grid, roster, play


def check_round(play, honest):
    """Run a round; returns whether the liar's reply was refused."""
    result, _ = capture(play)
    failed = set(result.failures)
    assert not failed & honest
    assert all(reason.isprintable() for reason in result.failures.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.aggregate))
    assert result.accepted.dtype == bool
    for values in result.infos.values():
        assert values.dtype.kind == "f"
        with np.errstate(over="ignore"):
            float(np.nanmean(values))
    return bool(failed)


def meet(roster, required=True):
    """Query the liar again, as after a round in which it did not reply."""
    roster.suspect(LIAR)
    roster.asked.clear()
    capture(roster.refresh)
    capture(roster.refresh)
    assert LIAR in roster.sites or not required


def count_refused(tmp_path, cases, seed):
    """(refused, read) of so many mutated replies to a round, to queries, and of their bytes."""
    refused = read = 0
    setups = [deployment(name, tmp_path) for name in METHODS]
    honest = set(CLIENTS.ids[1::2])
    for grid, roster, play in setups:
        assert not check_round(play, honest)
        grid.damage = lambda contents: dict.fromkeys(contents, b"")
        capture(play)  # from now on the honest node's replies are read alone
        grid.damage = None
        meet(roster)
        assert not check_round(play, honest)
    tracemalloc.start()
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        grid, roster, play = setups[case % len(setups)]
        grid.change = grid.damage = None
        if case % 4:
            grid.change = lambda kind, content, draw=draw: change_record(kind, content, draw)
        else:
            grid.damage = lambda contents, draw=draw: change_objects(contents, draw)
        if case % 5 == 0:  # its reply to the query
            meet(roster, required=False)
            was_refused = LIAR not in roster.sites
            assert HONEST in roster.sites
        else:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            was_refused = check_round(play, honest)
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY, case
        refused, read = refused + was_refused, read + (not was_refused)
        grid.change = grid.damage = None
        if LIAR not in roster.sites:
            meet(roster)
    tracemalloc.stop()
    print(f"\n{cases:,} mutated replies: {refused:,} refused, {read:,} read as right data")
    return refused, read


def test_mutated_replies_are_refused_or_right(tmp_path):
    refused, read = count_refused(tmp_path, 150, "few")
    assert refused > read > 0


@pytest.mark.long
def test_ten_thousand_mutated_replies(tmp_path):
    refused, read = count_refused(tmp_path, 10_000, "many")
    assert refused > read > 0


def list_files(directory):
    return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}


def count_refused_messages(tmp_path, cases, seed):
    """(refused, answered) of so many mutated messages to a node that keeps states in files."""
    node = make_node(PROBLEM, METHODS["scaffold"])
    app = client_app(lambda settings, holding: node)
    states = tmp_path / "states"
    grid, _, play = deployment("scaffold", tmp_path)
    capture(play)
    sent = {m.metadata.message_type: m.content for m in grid.sent if m.metadata.dst_node_id == LIAR}
    kept = grid.contexts[LIAR].node_config
    context = Context(1, LIAR, kept | {"state-dir": str(states)}, RecordDict(), {})
    outside, refused, read = list_files(tmp_path), 0, 0
    for case in range(cases):
        draw = random.Random(f"{seed} {case}")
        kind = "train" if case % 4 else "query"
        content = change_record(kind, copy.deepcopy(sent[kind]), draw)
        message = Message(content, dst_node_id=LIAR, message_type=kind)
        reply, _ = capture(lambda message=message: app(message, context))
        said = reply.content["config"]
        was_refused = "error" in said
        if was_refused:
            assert str(said["error"]).isprintable()
        elif kind == "train":
            assert len(said["accepted"]) == len(said["clients"])
        inside = {path for path in list_files(tmp_path) if path.is_relative_to(states)}
        assert {
            path: n for path, n in list_files(tmp_path).items() if path not in inside
        } == outside
        refused, read = refused + was_refused, read + (not was_refused)
    print(f"\n{cases:,} mutated messages to a node: {refused:,} refused, {read:,} answered")
    return refused, read


def test_mutated_messages_to_a_node_are_refused_or_answered(tmp_path):
    refused, read = count_refused_messages(tmp_path, 40, "few")
    assert refused > 0 < read


@pytest.mark.long
def test_a_thousand_mutated_messages_to_a_node(tmp_path):
    refused, read = count_refused_messages(tmp_path, 1000, "many")
    assert refused > 0 < read
