"""Private deployments: noise and cohorts from the operating system, every release counted."""

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod

from fedpa.experiments.flower import client_app, load_served, run_settings
from fedpa.experiments.run import run
from fedpa.flower import server
from fedpa.flower.roster import read_connection
from fedpa.privacy import Ledger
from fedpa.training.checkpoint import checkpoint_path, list_checkpoints
from tests.flower.loopback_grid import LoopbackGrid, capture
from tests.refusals import refused

SETTINGS = {
    "task": "digits",
    "method": "fedavg",
    "rounds": 3,
    "clients-per-round": 6,
    "epochs": 1,
    "eval-every": 3,
    "min-nodes": 3,
    "start-timeout": 0.3,
    "round-timeout": 0.3,
    "poll": 0.01,
    "clip": 1.0,
    "noise-multiplier": 1.0,
    "delta": 0.001,
    "accountant": "rdp",
}
THIRDS = [{"partition-id": k, "num-partitions": 3} for k in range(3)]


def settings(tmp_path, **changes):
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    return {"out": str(tmp_path / "run"), **SETTINGS, **changed}


def grid_of(config):
    return LoopbackGrid(client_app(), config, THIRDS)


def serve(config, grid=None):
    grid = grid_of(config) if grid is None else grid
    return server.serve(grid, read_connection(config), load_served(config))


@pytest.mark.long
def test_with_all_clients_and_hardly_any_noise_it_is_the_local_run(tmp_path):
    config = settings(tmp_path, rounds=2, clients_per_round=100, noise_multiplier=1e-6)
    config |= {"sampling": "fixed", "accountant": "pld"}
    deployed, alone = serve(config), run(run_settings(config), None)
    for one, other in zip(deployed.params.layers, alone.params.layers, strict=True):
        np.testing.assert_allclose(one.weight, other.weight, atol=1e-4)


def test_a_deployment_tells_nothing_without_noise_and_counts_what_it_repeats(tmp_path):
    config = settings(tmp_path)
    grid = grid_of(config)
    first = serve(config, grid)
    out = tmp_path / "run"
    records = (out / "metrics.jsonl").read_text()
    assert "client" not in records
    assert not {key for record in first.history for key in record if key.startswith("comm/")}
    keys = {key for record in first.history for key in record if key.startswith("train/")}
    assert keys == {"train/skipped"}
    ledger = (out / "privacy.jsonl").read_text()
    assert [json.loads(line) for line in ledger.splitlines()] == [{"round": t} for t in (1, 2, 3)]
    # As after a crash in round 3, whose model had left the server.
    shutil.rmtree(checkpoint_path(out, list_checkpoints(out)[-1]))
    for name in ("summary.json", "params.npz"):
        (out / name).unlink()
    done = max(list_checkpoints(out), default=0)
    again = serve(config)
    assert Ledger(out / "privacy.jsonl").count() == 3 + (3 - done)
    last, before = again.history[-1], first.history[-1]
    assert last["privacy/releases"] == 3 + (3 - done)
    assert last["privacy/epsilon"] > before["privacy/epsilon"]
    assert not np.equal(again.params.layers[0].weight, first.params.layers[0].weight).all()
    with refused("max_epsilon = 0.5"):
        serve({**config, "max-epsilon": 0.5, "rounds": 4})


def test_nodes_send_no_numbers_about_clients(tmp_path):
    config = settings(tmp_path, rounds=1, clients_per_round=60)
    grid, seen = grid_of(config), []
    grid.faults = dict.fromkeys(
        grid.contexts, lambda content: seen.append(dict(content["metrics"]))
    )
    serve(config, grid)
    assert seen == [{}] * 3


def test_a_node_whose_sum_is_too_long_is_left_out(tmp_path):
    config = settings(tmp_path, rounds=1, clients_per_round=60, noise_multiplier=1e-6)
    grid = grid_of(config)

    def lengthen(content):
        arrays = content["arrays"]
        for name in list(arrays):
            arrays[name] = Array(np.full_like(arrays[name].numpy(), 100.0))

    grid.faults = {101: lengthen}
    result, text = capture(lambda: serve(config, grid))
    assert "clipped results" in text
    assert all(np.abs(layer.weight).max() < 10 for layer in result.params.layers)


def test_turns_are_refused(tmp_path):
    with refused("sampling = 'cyclic'"):
        serve(settings(tmp_path, sampling="cyclic"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mod", "name"),
    [
        (fixedclipping_mod, "fixedclipping_mod"),
        (adaptiveclipping_mod, "adaptiveclipping_mod"),
        (LocalDpMod(1.0, 0.0, 1.0, 1e-5), "LocalDpMod"),
    ],
)
def test_flowers_mods_for_privacy_are_refused_by_name(mod, name):
    with refused(f"mods = {name!r}"):
        client_app(mods=[mod])
    client_app(mods=[message_size_mod])
