"""Rounds over messages are the rounds of the local engine; what is wrong on the way is refused."""

import contextlib
import io
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

import jax
import jax.numpy as jnp
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict

import fedpa
from fedpa.errors import BadValueError, FedpaError, NoUsableClientError
from fedpa.experiments.flower import client_app, load_node, load_served, run_settings
from fedpa.experiments.methods import METHODS
from fedpa.experiments.run import run
from fedpa.flower import server
from fedpa.flower.client import run_clients
from fedpa.flower.node import Holding, StateFiles, StateStore
from fedpa.flower.roster import read_connection
from fedpa.flower.wire import Assignment, WireError, check_weight, describe_error, read_reply
from fedpa.training.checkpoint import checkpoint_path
from tests.flower.loopback_grid import LoopbackGrid, capture
from tests.refusals import refused


def serve(grid, config):
    """What the app of names does with a run's settings."""
    return server.serve(grid, read_connection(config), load_served(config))


SETTINGS = {
    "task": "digits",
    "method": "fedpa",
    "rounds": 3,
    "clients-per-round": 6,
    "burn-in-rounds": 1,
    "epochs": 2,
    "seed": 3,
    "eval-every": 3,
    "min-nodes": 3,
    "start-timeout": 0.3,
    "round-timeout": 0.3,
    "poll": 0.01,
}
THIRDS = [{"partition-id": k, "num-partitions": 3} for k in range(3)]


def settings(tmp_path, **changes):
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    return {"out": str(tmp_path / "run"), **SETTINGS, **changed}


def grid_of(config, nodes=THIRDS):
    return LoopbackGrid(client_app(), config, nodes)


def assert_close(a, b, tolerance=1e-5):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if hasattr(one, "shape"):
            np.testing.assert_allclose(one, other, atol=tolerance, rtol=0)


def served(config, nodes=THIRDS):
    return serve(grid_of(config, nodes), config)


FEW = ("fedpa",)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.long)
        for name, method in METHODS.items()
        if not method.pooled
    ],
)
@pytest.mark.filterwarnings("ignore:a client takes part")
def test_every_method_gives_the_local_engines_parameters(tmp_path, method):
    """Over three rounds that cross the burn-in switch, where the method has one."""
    config = settings(tmp_path, method=method)
    if method in FEW:  # of which each node's clients have the share of their examples among all
        config["prior-sd"] = 0.3
    if not METHODS[method].samples:
        del config["burn-in-rounds"]
    if method in ("fedavg-1", "afo"):
        del config["epochs"]
    fit = served(config)
    alone = run(run_settings(config), None)
    assert_close(fit.params, alone.params)
    phases = [record["phase"] for record in fit.history]
    assert phases == [record["phase"] for record in alone.history]
    if METHODS[method].samples:
        assert phases[0] != phases[-1]
    told = ("train/loss", "train/delta_norm", "train/rejected", "train/skipped")
    for here, there in zip(fit.history, alone.history, strict=True):
        for name in told:
            assert here[name] == pytest.approx(there[name], rel=1e-4)


def test_the_model_crosses_the_wire_once_each_way_in_float32(tmp_path):
    traffic = {}
    for method in ("fedavg", "fedpa"):
        config = settings(tmp_path / method, method=method)
        if method == "fedavg":
            del config["burn-in-rounds"]
        grid = grid_of(config)
        fit = serve(grid, config)
        sent = [message for message in grid.sent if message.metadata.message_type == "train"]
        for message in sent:
            arrays = [array.numpy() for array in message.content["arrays"].values()]
            assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
            assert (
                sum(array.size for array in arrays) == 2_410 + 1
            )  # θ and the learning rate's factor
        traffic[method] = [
            (record["comm/bytes_up"], record["comm/bytes_down"]) for record in fit.history
        ]
        assert len(sent) <= 3 * 3
    for usual, sampling in zip(traffic["fedavg"], traffic["fedpa"], strict=True):
        assert sampling[0] <= 1.01 * usual[0]
        assert sampling[1] <= 1.01 * usual[1]
    up, down = traffic["fedpa"][-1]
    assert up < 3 * 1.1 * 4 * 2_410
    assert down < 3 * 1.1 * 4 * 2_410


def change_array(content, change):
    name = next(iter(content["arrays"]))
    value = change(content["arrays"][name].numpy().copy())
    content["arrays"][name] = Array(value)


def with_nan(array):
    array.flat[0] = np.nan
    return array


def drop_array(content):
    arrays = dict(content["arrays"])
    arrays.pop(next(iter(arrays)))
    content["arrays"] = ArrayRecord(arrays)


def change_weight(content, change):
    (name,) = (name for name, array in content["arrays"].items() if array.numpy().ndim == 0)
    weight = content["arrays"][name].numpy()
    content["arrays"][name] = Array(np.asarray(change(weight), weight.dtype))


def set_weight(content, value):
    change_weight(content, lambda weight: value)


def reject_one(content):
    accepted = content["config"]["accepted"]
    content["config"]["accepted"] = [False, *accepted[1:]]


FORGED = "gone\nfedpa: round 9: all is well\x1b[2J" + "x" * 2_000_000


def set_examples(content, change):
    content["config"]["examples"] = [change(n) for n in content["config"]["examples"]]


def claim_size(content):
    """A header of an array of 373 GiB, in a few bytes."""
    data = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (99999999999,)}
    np.lib.format.write_array_header_1_0(data, header)
    large = Array("float32", (99999999999,), "numpy.ndarray", data.getvalue())
    content["arrays"].update(dict.fromkeys(content["arrays"], large))


UNREADABLE = Array(dtype="float32", shape=(1,), stype="numpy.ndarray", data=b"abc")
FAULTS = {
    "another shape": (lambda c: change_array(c, lambda a: a[..., :-1].copy()), "has shape"),
    "another type": (lambda c: change_array(c, lambda a: a.astype(np.float64)), "has type"),
    "an array less": (drop_array, "there is no array"),
    "nan": (lambda c: change_array(c, with_nan), "not finite"),
    "a negative weight": (lambda c: set_weight(c, -5.0), "weight = -5"),
    "an absurd weight": (lambda c: set_weight(c, 2.0**100), "weight = 1.2676506e+30"),
    "a little less weight": (lambda c: change_weight(c, lambda q: q - 1), "accepted clients is"),
    "a little more weight": (lambda c: change_weight(c, lambda q: q * 1.00001), "weight = "),
    "a client that failed, with its weight": (reject_one, "weight = "),
    "a number of a name over lines": (
        lambda c: c["metrics"].update({FORGED: [1.0] * len(c["config"]["clients"])}),
        "gone\\nfedpa: round 9",
    ),
    "a negative count": (lambda c: set_examples(c, lambda n: -n), "examples = -"),
    "an absurd count": (lambda c: set_examples(c, lambda n: 10**9), "examples = 1000000000"),
    "a number of no name": (
        lambda c: c["metrics"].update(surprise=[1.0] * len(c["config"]["clients"])),
        "surprise is not among the numbers",
    ),
    "other clients": (lambda c: c["config"].update(clients=["x"]), "that were asked for"),
    "no records": (lambda c: c.clear(), "there is no record"),
    "a number for clients": (
        lambda c: c["config"].update(clients=5),
        "clients = 5: must be a list",
    ),
    "bytes that are no array": (
        lambda c: c["arrays"].update(dict.fromkeys(c["arrays"], UNREADABLE)),
        "can't be read",
    ),
    "numbers for arrays": (lambda c: c.update(arrays=c["metrics"]), "is not among the arrays"),
    "a text among numbers": (
        lambda c: c["config"].update(examples=["x"] * len(c["config"]["examples"])),
        "examples = 'x': must be a whole number",
    ),
    "a list of nothing": (
        lambda c: c["config"].update(accepted=[]),
        "accepted must have one",
    ),
    "depths": (lambda c: c["config"].update(failed="[" * 100_000), "failed = '[["),
    "no arrays": (lambda c: c.pop("arrays"), "makes no sense"),
    "texts for numbers": (
        lambda c: c.update(metrics=ConfigRecord({name: ["x"] * 4 for name in c["metrics"]})),
        "metrics is not a record of numbers",
    ),
    "an array that claims to be large": (claim_size, "has shape [99999999999]"),
    "flower's error": (5, "the node is gone"),
}


@pytest.mark.filterwarnings("ignore:round")
def test_what_makes_no_sense_is_named_and_does_not_move_the_model(tmp_path):
    """A fault a round, always of one node: the model is what the other two make without it."""
    config = settings(tmp_path, rounds=len(FAULTS), clients_per_round=12)
    node = 102

    def one_a_round(grid, faults):
        """Before each round, the next fault."""
        original = grid.push_messages

        def push(messages):
            messages = list(messages)
            if messages[0].metadata.message_type == "train":
                grid.faults[node] = faults.pop(0)
            return original(messages)

        grid.push_messages = push
        return grid

    wrong = [fault for fault, _ in FAULTS.values()]
    fit, text = capture(lambda: serve(one_a_round(grid_of(config), wrong), config))
    gone = {**config, "out": str(tmp_path / "gone")}
    grid = one_a_round(grid_of(gone), [lambda content: content.clear()] * len(FAULTS))
    assert_close(fit.params, serve(grid, gone).params, 0)
    lines = text.splitlines()
    for t, (record, (name, (_, said))) in enumerate(zip(fit.history, FAULTS.items(), strict=True)):
        assert record["train/rejected"] == len(record["train/rejected_clients"]) > 0, name
        held = {f"client-{k:03d}" for k in range(1, 100, 3)}
        assert set(record["train/rejected_clients"]) <= held, name
        told = [line for line in lines if line.startswith(f"fedpa: round {t + 1}: node 1: ")]
        assert told, name
        assert said in told[0], name
    assert all(len(line) < 1000 and line.isprintable() for line in lines)
    assert not any(line.startswith("fedpa: round 9: all is well") for line in lines)


@pytest.mark.filterwarnings("ignore:round")
def test_what_flower_can_t_read_of_one_node_is_missing_of_no_other(tmp_path):
    """Flower raises an error for all messages of a poll, and has taken those before it."""
    config = settings(tmp_path, clients_per_round=12)
    grid = grid_of(config)
    original = grid.pull_messages

    def pull(ids):
        replies = [reply for name in ids for reply in original([name])]
        if any(r.metadata.src_node_id == 102 and "arrays" in r.content for r in replies):
            raise TypeError("unhashable type: 'list'")
        return replies

    grid.pull_messages = pull
    fit, text = capture(lambda: serve(grid, config))
    assert "each is now read alone" in text
    held = {f"client-{k:03d}" for k in range(1, 100, 3)}
    last = fit.history[-1]  # in the first round others were lost with it, and are queried again
    assert set(last["train/rejected_clients"]) <= held
    assert 0 < last["train/rejected"] < 12


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("[" * 100_000, "clients.json"),
        ("[]", "clients.json: content = []"),
        ('{"run": "../x", "clients": {"a": 1}}', "clients.json: run = '../x'"),
        ('{"run": "5e", "clients": {}}', "clients.json: clients = {}"),
        ('{"run": "5e", "clients": {"a": -1}}', "clients.json: examples of client 'a' = -1"),
        ('{"run": "5e", "clients": {"a": Infinity}}', "clients.json: examples of client 'a' = inf"),
        ('{"run": "5e", "clients": {"a\\nb": 1}}', "clients.json: client 'a"),
    ],
)
def test_a_damaged_list_of_clients_is_named(tmp_path, content, field):
    (tmp_path / "config.toml").write_text("[environment]")
    (tmp_path / "clients.json").write_text(content)
    with refused(field):
        server.read_start(tmp_path)


def test_errors_of_nodes_and_of_single_clients_are_shown_in_one_line():
    said = ConfigRecord({"error": FORGED})
    with pytest.raises(WireError) as error:
        read_reply(RecordDict({"config": said}), {}, (), {"a": 3})
    failed = {"clients": ["a"], "accepted": [False], "examples": [0]}
    failed |= {"failed": ["a"], "reasons": [FORGED]}
    content = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord(failed)})
    _, report, _ = read_reply(content, {}, (), {"a": 3})
    gone = describe_error(Error(2, FORGED))
    for text in (str(error.value), report.reasons[0], gone):
        assert "gone\\nfedpa: round 9: all is well\\x1b[2J" in text
        assert text.isprintable()
        assert len(text) < 600


def test_weights_above_what_float32_counts_may_be_rounded():
    """By one rounding a client, and no more."""
    check_weight(np.float32(21_000_004), 21_000_003.0, clients=3)
    with pytest.raises(WireError, match="weight = 21000012"):
        check_weight(np.float32(21_000_012), 21_000_003.0, clients=3)


@pytest.mark.filterwarnings("ignore:round")
def test_sums_of_clients_that_don_t_count_and_sums_too_large_are_left_out(tmp_path):
    config = settings(tmp_path, clients_per_round=12)

    def huge(content):
        for name, array in content["arrays"].items():
            if array.numpy().ndim:  # not the weight
                content["arrays"][name] = Array(np.full_like(array.numpy(), 3e38))

    def uncounted(content):
        huge(content)
        content["config"]["accepted"] = [False] * len(content["config"]["accepted"])
        set_weight(content, 0.0)

    grid = grid_of(config)
    grid.faults[101] = uncounted
    fit = serve(grid, config)
    without = {**config, "out": str(tmp_path / "without")}
    grid = grid_of(without)
    grid.faults[101] = lambda content: content.clear()
    assert_close(fit.params, serve(grid, without).params, 0)
    both = {**config, "out": str(tmp_path / "both")}
    grid = grid_of(both)
    grid.faults[102] = grid.faults[103] = huge
    _, text = capture(lambda: serve(grid, both))
    assert "its sum is too large" in text


@pytest.mark.filterwarnings("ignore:round")
def test_a_round_whose_clients_all_fail_is_skipped(tmp_path):
    """The run continues, unless all rounds are such, or min-success says otherwise."""
    config = settings(tmp_path, rounds=2)
    grid = grid_of(config)
    for node in (101, 102, 103):
        grid.faults[node] = lambda content: content.clear()
    with pytest.raises(NoUsableClientError, match="rounds 1 to 2 had no usable client update"):
        serve(grid, config)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["train/skipped"] for record in records] == [1]
    grid = grid_of(config)
    grid.faults[101] = lambda content: content.clear()
    strict = {**config, "out": str(tmp_path / "strict"), "min-success": 0.9, "seed": 0}
    with pytest.raises(FedpaError, match=r"min_success = 0.9"):
        serve(grid, strict)


def test_all_nodes_that_are_connected_are_waited_for(tmp_path):
    """Else the run's clients would be those of who answered first."""
    config = settings(tmp_path, min_nodes=1, start_timeout=5.0)
    grid = grid_of(config)
    original, looks = grid.pull_messages, []

    def slow(ids):
        looks.append(ids)
        return original(ids if len(looks) > 5 else list(ids)[:1])

    grid.pull_messages = slow
    serve(grid, config)
    assert len(json.loads((tmp_path / "run" / "clients.json").read_text())["clients"]) == 100


@pytest.mark.filterwarnings("ignore:round")
def test_a_node_that_was_silent_takes_part_again(tmp_path):
    config = settings(tmp_path, rounds=4, clients_per_round=30)
    grid = grid_of(config)
    grid.faults[102] = None

    original = grid.get_node_ids

    def recovering():
        if sum(m.metadata.message_type == "train" for m in grid.sent) >= 5:
            grid.faults.clear()
        return original()

    grid.get_node_ids = recovering
    fit, text = capture(lambda: serve(grid, config))
    assert "round 1: node 1: no answer in 0.3 s" in text
    rejected = [record["train/rejected"] for record in fit.history]
    assert rejected[0] > 0
    assert rejected[-1] == 0


def test_a_node_that_was_started_anew_takes_its_own_place(tmp_path):
    """Flower lists the one that crashed for a minute: the new one is not taken for a second."""
    config = settings(tmp_path, rounds=2)
    grid = grid_of(config, [*THIRDS, {**THIRDS[1], "name": "anew"}])
    original, asked = grid.push_messages, []

    def push(messages):
        asked.extend(m.metadata.dst_node_id for m in messages)
        if asked.count(102) == 2 and 102 in grid.contexts:
            grid.leave(102)
            return [None for _ in messages]
        return original(messages)

    grid.push_messages = push
    fit, text = capture(lambda: serve(grid, config))
    assert text.count("anew has the same clients as node 1, and replaces it") == 1
    assert [record["train/rejected"] for record in fit.history] == [0, 0]


@pytest.mark.filterwarnings("ignore:round")
def test_a_node_that_appears_in_mid_round_is_in_the_next(tmp_path, monkeypatch):
    """It is asked what it holds while the round's answers are waited for."""
    import fedpa.flower.roster as roster

    monkeypatch.setattr(roster, "LOOK", 0.0)
    config = settings(tmp_path, rounds=2, clients_per_round=90)
    grid = grid_of(config)
    grid.faults[101] = None  # silent: the others wait for it
    original = grid.push_messages

    def push(messages):
        messages = list(messages)
        names = original(messages)
        if messages[0].metadata.message_type == "train" and 102 in grid.contexts:
            grid.leave(102)
            grid.join(204, THIRDS[1])
        return names

    grid.push_messages = push
    fit = serve(grid, config)
    gone = [set(record["train/rejected_clients"]) for record in fit.history]
    held = {f"client-{k:03d}" for k in range(1, 100, 3)}
    assert not gone[1] & held  # the new node's
    trained = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == "train"]
    assert trained.count(204) == 1


@pytest.mark.filterwarnings("ignore:round")
def test_a_node_that_is_back_by_its_own_number_is_in_the_next_round(tmp_path, monkeypatch):
    """With keys a node keeps its number: what it failed before it was gone is not held against it.

    Node 102 is gone in mid-round, by Flower's word, and back before the round is over.
    """
    import fedpa.flower.roster as roster

    monkeypatch.setattr(roster, "LOOK", 0.0)
    config = settings(tmp_path, rounds=2, clients_per_round=90)
    grid = grid_of(config)
    grid.faults = {101: None, 102: 5}  # the first is waited for
    original, look, looks = grid.push_messages, grid.get_node_ids, []

    def push(messages):
        messages = list(messages)
        names = original(messages)
        if messages[0].metadata.message_type == "train" and not looks:
            looks.append(0)
        return names

    def nodes():
        if looks:
            looks.append(1)
        if len(looks) > 3:
            grid.faults = {}
        return [node for node in look() if node != 102 or len(looks) != 2]

    grid.push_messages, grid.get_node_ids = push, nodes
    fit = serve(grid, config)
    held = {f"client-{k:03d}" for k in range(1, 100, 3)}
    gone = [set(record.get("train/rejected_clients", ())) for record in fit.history]
    assert gone[0] & held
    assert not gone[1] & held


@pytest.mark.filterwarnings("ignore:round")
def test_a_run_goes_on_from_its_directory(tmp_path):
    """With a node less there, too: its clients fail, and the cohorts stay the same."""
    config = settings(tmp_path, rounds=4)
    whole = served({**config, "out": str(tmp_path / "whole")})
    served({**config, "rounds": 2})
    fit = served(config)
    assert_close(fit.params, whole.params, 0)
    assert len(fit.history) == 4

    short = {**config, "out": str(tmp_path / "short"), "min-nodes": 2}
    served({**short, "rounds": 2})
    fit = served(short, THIRDS[:2])
    gone = {name for record in fit.history[2:] for name in record.get("train/rejected_clients", ())}
    held = {f"client-{k:03d}" for k in range(2, 100, 3)}
    assert gone
    assert gone <= held


@pytest.mark.filterwarnings("ignore:a client takes part")
@pytest.mark.long
def test_what_clients_keep_stays_on_their_node(tmp_path):
    config = settings(tmp_path, method="scaffold", rounds=3, clients_per_round=3, epochs=1)
    del config["burn-in-rounds"]
    config |= {"seed": 0}
    few = [{"clients": f"client-00{k}"} for k in range(3)]
    fit = served(config, few)
    grid = grid_of({**config, "out": str(tmp_path / "again")}, few)
    again, text = capture(lambda: serve(grid, {**config, "out": str(tmp_path / "again")}))
    assert_close(fit.params, again.params, 0)
    assert "start again" not in text
    assert all(len(context.state) for context in grid.contexts.values())
    sent = [m.content["config"]["states"] for m in grid.sent if "states" in m.content["config"]]
    assert sorted(t for states in sent for t in states) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    # A node that was started anew has lost them, and says so.
    grid = grid_of({**config, "out": str(tmp_path / "lost")}, few)
    grid.faults[101] = lambda content: grid.contexts[101].state.clear()
    _, text = capture(lambda: serve(grid, {**config, "out": str(tmp_path / "lost")}))
    assert "has lost the states of 1 of its clients ('client-000', …): they start again" in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.long)])
def test_with_a_state_directory_a_run_goes_on_exactly(tmp_path, every):
    """Nodes and server are started anew; the last rounds, of which no checkpoint is, come again."""
    config = settings(tmp_path, method="scaffold", rounds=6, clients_per_round=2, epochs=1)
    del config["burn-in-rounds"]
    config |= {"checkpoint-every": every, "keep-checkpoints": 6}
    few = [
        {"clients": f"client-00{k}", "state-dir": str(tmp_path / "states" / str(k))}
        for k in range(3)
    ]
    whole = served({**config, "out": str(tmp_path / "whole")}, few)
    served({**config, "rounds": 5}, few)
    # As a kill between two checkpoints leaves it: nodes are ahead of the server.
    for t in (4, 5):
        shutil.rmtree(checkpoint_path(tmp_path / "run", t), ignore_errors=every == 3)
    grid = grid_of(config, few)
    fit, text = capture(lambda: serve(grid, config))
    assert "start again" not in text
    assert "resuming the run in that directory after round 3" in text
    assert len(fit.history) == 6
    assert_close(fit.params, whole.params, 0)
    assert not any(len(context.state) for context in grid.contexts.values())
    kept = list((tmp_path / "states").rglob("*.npz"))
    assert len(kept) <= 2 * 3 * (4 if every == 1 else 6)  # two runs, three clients


def test_states_that_nobody_will_ask_for_are_dropped(tmp_path):
    contexts = (StateStore(RecordDict()), StateStore(StateFiles(tmp_path / "run")))
    template = {"c": jnp.zeros(3), "n": jnp.zeros(())}
    for store in contexts:
        for t in (2, 4, 5, 7):
            store.put({"a/ü": {"c": jnp.full(3, float(t)), "n": jnp.float32(t)}}, t)
        store.put({"b": {"c": jnp.zeros(3), "n": jnp.zeros(())}}, 2)
        found, lost = store.take(template, ["a/ü"], [5], floor=4)
        assert lost == []
        np.testing.assert_array_equal(found["a/ü"]["c"], [5.0] * 3)
        assert float(found["a/ü"]["n"]) == 5.0
        assert sorted(store.rounds("a/ü")) == [4, 5]  # 2 is older than 4; 7 was never counted
        assert store.rounds("b") == [2]
        store.put({"a/ü": {"c": jnp.zeros(3), "n": jnp.zeros(())}}, 3)  # of a round long over
        assert sorted(store.rounds("a/ü")) == [4, 5]
        assert store.take(template, ["a/ü", "b", "c"], [3, 0, 0], floor=3) == ({}, ["a/ü"])
        assert not any(store.rounds(name) for name in ("a/ü", "b", "c"))  # all of later rounds


def test_a_state_that_is_damaged_is_lost_and_no_other(tmp_path):
    store = StateStore(StateFiles(tmp_path / "run"))
    store.put({name: {"c": jnp.ones(3)} for name in "ab"}, 2)
    damaged = sorted((tmp_path / "run").iterdir())[0]
    damaged.write_bytes(b"PK")
    found, lost = store.take({"c": jnp.zeros(3)}, ["a", "b"], [2, 2], floor=2)
    assert len(found) == len(lost) == 1
    assert {*found, *lost} == {"a", "b"}
    assert not damaged.exists()


REFUSED = {
    "too few nodes": (
        {},
        THIRDS[:2],
        "min-nodes = 3, but 2 of 2 connected nodes can take part after start-timeout",
    ),
    "a client that is not there": (
        {},
        [{"clients": "client-000"}, {"clients": "client-001, nobody"}, {"clients": "client-002"}],
        "no client 'nobody'",
    ),
    "a client on two nodes": (
        {},
        [
            {"clients": "client-000"},
            {"clients": "client-000,client-001"},
            {"clients": "client-002"},
        ],
        "both have client 'client-000'",
    ),
    "all clients on two nodes": (
        {"start-timeout": 30.0},
        [*THIRDS, {**THIRDS[1], "name": "dup"}],
        "both have client 'client-001'",
    ),
    "a client of a node that has more": (
        {},
        [{"clients": "client-001", "name": "stray"}, *THIRDS],
        "node 1 and stray both have client 'client-001'",
    ),
    "a misspelt setting of a node": (
        {},
        [{"client": "client-001"}, *THIRDS[:2]],
        "node config: unknown field client: did you mean clients?",
    ),
    "a directory that is not there": (
        {},
        [{"data-dir": "/nowhere", **THIRDS[0]}, *THIRDS[:2]],
        "node config: data-dir = '/nowhere': is not a directory on the node",
    ),
    "states where nothing can be written": (
        {},
        [{**THIRDS[0], "state-dir": "/proc/states"}, *THIRDS[1:]],
        "node config: state-dir = '/proc/states': can't be written to",
    ),
    "states somewhere or other": (
        {},
        [{**THIRDS[0], "state-dir": "~/states"}, *THIRDS[1:]],
        "node config: state-dir = '~/states': must be an absolute path",
    ),
    "a partition that is none": (
        {},
        [{"partition-id": 3, "num-partitions": 3}] * 3,
        "partition-id",
    ),
    "half a partition": ({}, [{"partition-id": 0}] * 3, "give both or neither"),
    "a setting of another type": ({}, [{"partition-id": "x"}] * 3, "partition-id = 'x'"),
    "an option that is none": ({"round": 3}, THIRDS, "did you mean rounds?"),
    "another type": ({"rounds": "many"}, THIRDS, "rounds = 'many'"),
    "a relative directory": ({"out": "here"}, THIRDS, "must be an absolute path"),
    "a method that pools data": ({"method": "centralized"}, THIRDS, "method = 'centralized'"),
    "a switch at the plateau": ({"burn-in-rounds": "auto"}, THIRDS, "burn_in_rounds = 'auto'"),
    "no time at all": ({"round-timeout": 0.0}, THIRDS, "round-timeout = 0.0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_any_work(tmp_path, what):
    changes, nodes, said = REFUSED[what]
    config = {**settings(tmp_path), **changes}
    if what == "a method that pools data":
        del config["burn-in-rounds"], config["epochs"]
    grid = LoopbackGrid(client_app(), settings(tmp_path), nodes)
    with pytest.raises(FedpaError) as error:
        serve(grid, config)
    assert said in str(error.value)
    assert not (tmp_path / "run").exists()
    assert not [message for message in grid.sent if message.metadata.message_type == "train"]


OTHERS = {
    "a model": (
        {"message/theta/layers/0/weight": "float32[16, 64]"},
        r"float32\[16, 64\] on the server and float32\[32, 64\]",
    ),
    "examples": (
        {"example/x": "float32[32]"},
        r"example/x is float32\[32\] on the server and float32\[64\]",
    ),
    "an array more": ({"example/z": "int32[]"}, r"is int32\[\] on the server and missing"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_not_the_servers_is_refused_by_its_array(tmp_path, monkeypatch, what):
    changes, said = OTHERS[what]
    original = server.describe_node

    def other(node):
        return {**original(node), **changes}

    monkeypatch.setattr(server, "describe_node", other)
    with pytest.raises(FedpaError, match=said):
        served(settings(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"examples": [2**31 - 1] * 34},
            "= 2147483647: must be a whole number from 0 to",
        ),
        ({"examples": [-1] * 34}, "examples of client 'client-000' = -1"),
        ({"clients": ["a"] * 34}, "each only once"),
        ({"clients": 5}, "clients = 5: must be a list"),
        ({"clients": ["a"]}, "must be lists of one length"),
        ({"clients": ["a\nb", *map(str, range(33))]}, "client 'a\\\\nb': an id must be"),
        ({"clients": ["a" * 300, *map(str, range(33))]}, "an id must be at most 200"),
        ({"error": FORGED}, "gone\\nfedpa: round 9: all is well\\x1b[2J"),
        ({"name": FORGED, "error": "no"}, "gone\\nfedpa: round 9: all is well\\x1b[2J"),
    ],
)
def test_a_node_that_tells_nonsense_of_itself_is_refused(tmp_path, changes, said):
    config = settings(tmp_path)
    grid = grid_of(config)
    original = grid.pull_messages

    def pull(ids):
        replies = original(ids)
        for reply in replies:
            if reply.metadata.src_node_id == 101:
                reply.content["config"].update(changes)
        return replies

    grid.pull_messages = pull
    with pytest.raises(FedpaError) as error:
        serve(grid, config)
    assert "min-nodes = 3, but 2 of 3 connected nodes can take part: " in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_run_that_no_node_can_take_part_in_fails_at_once(tmp_path):
    """Their reasons are given; nothing else is waited for, be the time-out ever so long."""
    config = settings(tmp_path, start_timeout=600.0)
    others = {**config, "task": "nowhere.clinics"}
    began = time.monotonic()
    with pytest.raises(FedpaError) as error:
        serve(LoopbackGrid(client_app(), others, THIRDS), config)
    assert time.monotonic() - began < 60
    text = str(error.value)
    assert "min-nodes = 3, but 0 of 3 connected nodes can take part: " in text
    assert all(
        f"node {k} refused (run config: task = 'nowhere.clinics': " in text for k in range(3)
    )


def test_nodes_are_waited_for_while_too_few_are_connected(tmp_path):
    config = settings(tmp_path, start_timeout=600.0, rounds=2)
    grid = grid_of(config, [{"clients": "nobody", "name": "wrong"}])
    original, looks = grid.get_node_ids, []

    def nodes():
        looks.append(1)
        if len(looks) == 5:
            grid.leave(101)
            for k, node in enumerate(THIRDS):
                grid.join(201 + k, node)
        return original()

    grid.get_node_ids = nodes
    assert len(serve(grid, config).history) == 2


def test_a_directory_that_is_refused_stays_as_it_was(tmp_path):
    config = settings(tmp_path, method="fedavg", rounds=1)
    del config["burn-in-rounds"]
    run(run_settings(config), tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(FedpaError, match="can't be resumed"):
        served(settings(tmp_path))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_another_version_of_fedpa_is_refused(tmp_path, monkeypatch):
    import fedpa.flower.roster as roster

    class Other:
        __version__ = "9.9"

    monkeypatch.setattr(roster, "fedpa", Other)
    with pytest.raises(FedpaError, match=r"fedpa is 9\.9 on the server and .* on the node"):
        served(settings(tmp_path))


@pytest.mark.parametrize("words", [[1, 2, 3], [1, 2, 3, -4], [1, 2, 3, 2**32]])
def test_keys_that_are_none_are_refused(tmp_path, words):
    node = load_node(settings(tmp_path), Holding())
    ids = list(node.clients.ids)[:2]
    with pytest.raises((TypeError, ValueError, OverflowError), match=r"key|reshape|bounds"):
        run_clients(node, Assignment("burn-in", 0, ids, words, 1.0, 100), None, {})


def test_no_example_is_told(tmp_path):
    """What a node says of its data: ids and sizes."""
    config = settings(tmp_path)
    grid = grid_of(config)
    said = []
    original = grid.pull_messages
    grid.pull_messages = lambda ids: [said.append(m) or m for m in original(ids)]
    serve(grid, config)
    queries = [m for m in said if m.metadata.message_type == "query"]
    assert len(queries) == 3
    for message in queries:
        assert list(message.content) == ["config"]
        about = message.content["config"]
        assert set(about) == {"name", "clients", "examples"}
    for message in (m for m in said if m.metadata.message_type == "train"):
        arrays = message.content["arrays"]
        assert sum(a.numpy().size for a in arrays.values()) == 2_410 + 1  # Σ q Δ and Σ q


@pytest.mark.filterwarnings("ignore:round")
def test_a_bad_value_is_not_told(tmp_path, monkeypatch):
    """Its place is in the node's log; the server learns of the kind of error."""

    def refuse(*arguments):
        raise BadValueError("client '7': y[0] = 424242: must be smaller")

    monkeypatch.setattr("fedpa.flower.client.run_clients", refuse)
    config = settings(tmp_path, rounds=2)
    grid = grid_of(config)
    said = []
    original = grid.pull_messages
    grid.pull_messages = lambda ids: [said.append(m) or m for m in original(ids)]
    with contextlib.suppress(FedpaError):  # no round has a client
        serve(grid, config)
    errors = [m.content["config"].get("error", "") for m in said]
    assert any("BadValueError" in error for error in errors)
    assert not any("424242" in error for error in errors)


@pytest.mark.long
def test_the_page_s_task_of_one_s_own(tmp_path, monkeypatch):
    """The deployment page's code, as it stands there; nodes have clients and no test split."""
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text("utf-8")
    code = "#" + page.split("```python\n# fedpa_app/clinics.py", 1)[1].split("```")[0]
    (tmp_path / "app_of_the_page").mkdir()
    (tmp_path / "app_of_the_page" / "clinics.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)

    def example_file(place, name, n):
        place.mkdir(parents=True, exist_ok=True)
        y = rng.integers(0, 10, n).astype(np.int32)
        x = rng.normal(size=(n, 64)).astype(np.float32) + 6 * np.eye(64, dtype=np.float32)[y]
        np.savez(place / f"{name}.npz", x=x, y=y)

    for site in range(2):
        for client in range(5):
            example_file(tmp_path / f"site{site}" / "train", f"patient-{site}-{client}", 20)
    example_file(tmp_path / "server" / "train", "shapes", 1)
    example_file(tmp_path / "server" / "test", "test", 300)
    config = {
        **settings(tmp_path, rounds=5, clients_per_round=8, epochs=5, min_nodes=2),
        "task": "app_of_the_page.clinics",
        "data-dir": str(tmp_path / "server"),
    }
    nodes = [{"data-dir": str(tmp_path / f"site{site}")} for site in range(2)]
    fit = served(config, nodes)
    assert fit.history[-1]["eval/accuracy"] > 0.6  # of ten classes
    assert [record["train/rejected"] for record in fit.history] == [0] * 5
    loaded = fedpa.load(tmp_path / "run")
    assert loaded.config.task == "app_of_the_page.clinics"
    assert_close(loaded.params, fit.params, 0)


@pytest.mark.filterwarnings("ignore")  # of few words, and clients without examples
def test_each_node_reads_its_own_directory(tmp_path):
    """Users' posts, each on one node; the server has all of them only to compare."""
    from fedpa.data.readers.hdf5 import write_hdf5
    from tests.experiments.tasks.test_benchmarks import posts, stackoverflow

    sizes = (3, 1, 20, 12, 0, 9)
    stackoverflow(tmp_path / "all", sizes)
    nodes = []
    for number in range(2):
        place = tmp_path / f"site{number}"
        stackoverflow(place, sizes)
        own = [number, number + 2, number + 4]
        clients = [(f"user-{i}", posts(sizes[i], i)) for i in own]
        write_hdf5(place / "stackoverflow_train.h5", clients)
        nodes.append({"data-dir": str(place), "name": f"site{number}"})
    config = {
        **settings(tmp_path, task="stackoverflow-lr", method="fedavg", clients_per_round=4),
        "rounds": 2,
        "min-nodes": 2,
        "data-dir": str(tmp_path / "all"),
    }
    del config["burn-in-rounds"]
    fit = served(config, nodes)
    alone = run(run_settings({**config, "engine": "per-client"}), None)  # as the nodes: compiled
    assert_close(fit.params, alone.params)
    assert json.loads((tmp_path / "run" / "clients.json").read_text())["clients"] == {
        f"user-{i}": n for i, n in enumerate(sizes)
    }
    # A node that is told to hold a client that its directory does not have says so.
    nodes[1] = {**nodes[1], "clients": "user-1,user-2"}
    with pytest.raises(
        FedpaError, match=r"site1 refused \(.* no client 'user-2' to train: it has 3"
    ):
        served({**config, "out": str(tmp_path / "other")}, nodes)
