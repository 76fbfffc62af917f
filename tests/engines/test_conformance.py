"""What every engine must do. A new engine joins by being in its package."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.data import from_mapping
from fedpa.engines import ENGINES, EngineOptions
from fedpa.errors import DataError, TooFewClientsError
from fedpa.objectives import Objective, least_squares
from tests.engines.federation import METHODS, leaves, train
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
"""Engines may sum in another order, in float32."""


@pytest.fixture(scope="module", name="reference")
def _reference():
    return {method: leaves(train("per-client", method)) for method in METHODS}


def _is_long(engine, method):
    """Debug is eager and slow, local is one of the others.

    MIME's second trip is the loop's: one engine more than the reference shows it.
    """
    quick = {
        "debug": (),
        "local": ("fedpa",),
        "sharded": ("fedavg", "fedpa", "scaffold"),
    }
    return method not in quick.get(engine, METHODS)


PAIRS = [
    pytest.param(engine, method, marks=[pytest.mark.long] * _is_long(engine, method))
    for engine in ENGINES
    for method in METHODS
]


@pytest.mark.parametrize(("engine", "method"), PAIRS)
def test_same_server_state(engine, method, reference):
    for one, other in zip(leaves(train(engine, method)), reference[method], strict=True):
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize("options", [{"clients_in_flight": 2, "workers": 2}, {"workers": 4}])
@pytest.mark.parametrize("engine", ["per-client", "vectorized"])
def test_any_width_gives_the_same(engine, options, reference):
    for one, other in zip(
        leaves(train(engine, "fedpa", **options)), reference["fedpa"], strict=True
    ):
        np.testing.assert_allclose(one, other, **TOLERANCE)


@pytest.mark.parametrize("engine", ["per-client", "vectorized", "sharded"])
def test_bit_reproducible_whoever_finishes_first(engine):
    """Threads race; the sum is made in the same order all the same."""
    runs = [leaves(train(engine, "fedpa", workers=3, clients_in_flight=1)) for _ in range(3)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def elsewhere(out, engine, devices, processes=1):
    """The same training by processes of their own, with so many devices each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(ROOT),
    }
    joining = [
        [f"127.0.0.1:{port}", str(processes), str(number)] if processes > 1 else []
        for number in range(processes)
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engines.federation", str(out), engine, *words],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in joining
    ]
    try:
        for process in running:
            said, _ = process.communicate(timeout=240)
            assert process.returncode == 0, said
    finally:
        for process in running:
            process.kill()
    return np.load(out)


@pytest.mark.parametrize(
    ("devices", "processes"),
    [pytest.param(*case, marks=pytest.mark.long) for case in ((2, 1), (4, 1), (1, 2))],
)
def test_sharded_over_devices_and_processes(devices, processes, tmp_path, reference):
    """Forced host devices, and two processes that meet on loopback. `local` chooses by itself."""
    engine = "sharded" if devices == 4 else "local"
    found = elsewhere(tmp_path / "one.npz", engine, devices, processes)
    for method in METHODS:
        for place, expected in enumerate(reference[method]):
            np.testing.assert_allclose(found[f"{method}-{place}"], expected, **TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(("devices", "processes"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_sharded_is_bit_reproducible(devices, processes, tmp_path):
    first = elsewhere(tmp_path / "one.npz", "sharded", devices, processes)
    again = elsewhere(tmp_path / "two.npz", "sharded", devices, processes)
    for name in first.files:
        np.testing.assert_array_equal(first[name], again[name])


def failing(names, how):
    def examples(name, read):
        return how(read(name)) if name in names else read(name)

    return examples


def unreadable(tree):
    raise OSError("no such file")


def too_large(tree):
    return jax.tree.map(lambda x: x * np.float32(1e30), tree)


def not_a_number(tree):
    return tree | {"y": np.where(np.arange(len(tree["y"])) == 1, np.nan, tree["y"])}


def another_shape(tree):
    return tree | {"x": np.concatenate([tree["x"], tree["x"]], axis=1)}


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (unreadable, "OSError: no such file"),
        (too_large, "finite|inf"),
    ],
)
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=[pytest.mark.long] * (name == "debug")) for name in ENGINES],
)
def test_a_failing_client_is_counted_and_named(engine, how, says):
    with pytest.warns(UserWarning, match=says) as caught:
        fit = train(engine, "fedavg", failing({"client-0002"}, how))
    assert any("client-0002" in str(w.message) for w in caught)
    for record in fit.history:
        assert record.get("train/rejected_clients", ["client-0002"]) == ["client-0002"]
    assert sum(record["train/rejected"] for record in fit.history) >= 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(fit.params))


@pytest.mark.parametrize(
    ("how", "anchors"),
    [
        (not_a_number, ["y[1] = nan"]),
        (another_shape, ["float32[6]", "float32[3]"]),
        (lambda tree: tree | {"y": tree["y"].astype(str)}, ["y", "<U32"]),
        (lambda tree: tree | {"y": tree["y"] * 1j}, ["y", "complex64"]),
        (lambda tree: tree | {"y": np.float32(0)}, []),
    ],
)
def test_a_client_whose_data_is_wrong_ends_the_run(how, anchors):
    """As a mapping with it would be refused."""
    with refused("client 'client-0002'", *anchors, kind=DataError):
        train("per-client", "fedavg", failing({"client-0002"}, how))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_in_which_everybody_fails_is_an_error(engine):
    with refused("no such file"):
        train(engine, "fedavg", lambda name, read: unreadable(name))


@pytest.mark.long
def test_the_debug_engine_names_client_step_and_value():
    with pytest.warns(UserWarning, match=r"client-0002: step 1: .*loss = inf"):
        train("debug", "fedavg", failing({"client-0002"}, too_large))


@pytest.mark.parametrize("engine", ["per-client", "vectorized"])
def test_examples_on_the_device_or_read_one_by_one_give_the_same_bits(engine):
    resident = leaves(train(engine, "fedpa"))
    read = leaves(train(engine, "fedpa", lambda name, read: read(name)))
    for one, other in zip(resident, read, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("engine", ["per-client", "vectorized"])
def test_a_client_that_raises_in_compiled_code_is_found(engine):
    """The block is run again lane by lane; the others count."""

    def loss(params, batch, key):
        value = (batch["x"] @ params) ** 2
        return eqx.error_if(value, batch["x"][:, 0] > 5, "an example is out of range")

    clients = {str(i): {"x": np.full((6, 3), i, np.float32)} for i in range(7)}
    local = fedpa.LocalTraining(optax.sgd(1e-3), batch_size=3)
    method = fedpa.fedavg(local, fedpa.Server(fedpa.server.sgd(1.0)))
    with pytest.warns(UserWarning, match=r"client 6: .*an example is out of range"):
        fit = fedpa.fit(
            loss,
            jnp.ones(3),
            clients,
            method,
            rounds=1,
            clients_per_round=7,
            engine=ENGINES[engine](EngineOptions()),
        )
    assert fit.history[0]["train/rejected_clients"] == ["6"]
    assert float(fit.params[0]) < 1


def test_too_few_successes_end_the_run():
    data = from_mapping({f"c{i}": {"x": np.ones((2, 3)), "y": np.ones(2)} for i in range(4)})
    read = data.examples
    lazy = data._replace(examples=lambda name: read(name) if name == "c0" else unreadable(name))
    arguments = (METHODS["fedavg"](Objective(least_squares.loss)), jnp.ones(3), lazy)
    with refused("round 1", "1 of 4", "min_success = 0.5", kind=TooFewClientsError):
        fedpa.train(*arguments, rounds=1, clients_per_round=4, min_success=0.5)
    with pytest.warns(UserWarning, match="no such file"):
        fedpa.train(*arguments, rounds=1, clients_per_round=4, min_success=0.25)
    with refused("min_success = 2"):
        fedpa.train(*arguments, rounds=1, clients_per_round=4, min_success=2)
