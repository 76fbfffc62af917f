"""FedPA for apps with a training step of their own: NumPy on the node, a strategy on the server."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedpa
from fedpa.errors import FedpaError
from fedpa.numpy_client import ClientWork, client_delta, posterior_delta
from tests.refusals import refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_numpy"


@given(
    seed=st.integers(0, 2**32 - 1),
    ell=st.integers(1, 6),
    rho=st.floats(0, 10),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_its_delta_is_the_librarys(seed, ell, rho, shapes):
    rng = np.random.default_rng(seed)
    theta = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    samples = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(ell)]
    found = posterior_delta(theta, samples, rho)
    stacked = [np.stack(each) for each in zip(*samples, strict=True)]
    expected = fedpa.posterior_delta(theta, stacked, rho)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
        assert a.dtype == np.float32


def halfway(arrays):
    """An epoch that goes half of the way to 1, in place, as frameworks do."""
    for array in arrays:
        array += (1 - array) / 2
    return arrays


def test_burn_in_rounds_are_fedavgs_and_sampling_takes_one_sample_an_epoch():
    theta = [np.zeros(3, np.float32)]
    burn_in = client_delta(theta, halfway, ClientWork(False, 3, 0, 0.1))
    np.testing.assert_allclose(burn_in[0], -0.875 * np.ones(3))
    sampled = client_delta(theta, halfway, ClientWork(True, 3, 1, 0.1))
    samples = [[np.full(3, x, np.float32)] for x in (0.75, 0.875)]
    np.testing.assert_allclose(sampled[0], posterior_delta(theta, samples, 0.1)[0])
    assert not theta[0].any()
    both = client_delta(
        theta, lambda arrays: (halfway(arrays), [np.ones(3)]), ClientWork(True, 2, 0, 0.1)
    )
    np.testing.assert_allclose(both[0], -1.1 * np.ones(3), rtol=1e-6)


def test_whole_numbers_are_not_trained_and_single_numbers_stay_single():
    """BatchNorm counts its batches: that must not enter the covariance."""
    rng = np.random.default_rng(0)
    steps = iter(rng.normal(size=(3, 4)).astype(np.float32))
    work = ClientWork(True, 3, 0, 0.3)

    def epoch(arrays):
        weights, scale, *count = arrays
        return [weights + next(steps), scale * 2, *(c + 100 for c in count)]

    theta = [np.zeros(4, np.float32), np.array(1, np.float32)]
    alone = client_delta(theta, epoch, work)
    steps = iter(np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32))
    beside = client_delta([*theta, np.array(7)], epoch, work)
    assert len(beside) == 2
    assert beside[1].shape == ()
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_epoch_of_other_shapes_and_settings_that_make_no_sense_are_refused():
    theta = [np.zeros(3, np.float32)]
    with pytest.raises(FedpaError, match=r"epoch: .*shapes \[\(2,\)\]"):
        client_delta(theta, lambda arrays: [np.zeros(2)], ClientWork(True, 1, 0, 0.1))
    with pytest.raises(FedpaError, match="burn_in_epochs = 2: must be less than epochs = 2"):
        client_delta(theta, halfway, ClientWork(True, 2, 2, 0.1))


def test_a_node_needs_no_jax():
    script = (
        "import sys, fedpa.numpy_client; sys.exit(any(m in sys.modules for m in ('jax', 'flwr')))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


ANSWER = """
import sys
for name in ("jax", "optax", "equinox", "jaxtyping", "blackjax"):
    sys.modules[name] = None  # importing it fails
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedpa.numpy_client import ClientWork, describe_work, reply

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
asked = ConfigRecord(describe_work(ClientWork(True, 2, 0, 0.1)))
sent = RecordDict({"arrays": ArrayRecord([np.zeros(3, np.float32)]), "config": asked})
answer = reply(Message(sent, 5, "train"), lambda arrays: [arrays[0] + 1], 9)
assert np.isfinite(answer.content["arrays"].to_numpy_ndarrays()[0]).all()
"""


def test_a_node_answers_without_jax():
    pytest.importorskip("flwr", reason="Flower is not installed")
    subprocess.run([sys.executable, "-c", ANSWER], check=True, timeout=60)


def test_the_example_trains_and_survives_a_bad_client(monkeypatch):
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flwr.app import Array, ArrayRecord

    from fedpa.flower import FedPA
    from tests.flower.loopback_grid import LoopbackGrid

    monkeypatch.syspath_prepend(str(EXAMPLE))
    from numpy_app.client import app
    from numpy_app.model import fresh, loss, site_data

    data = [site_data(k) for k in range(3)]
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))

    def trained(faults=None, **settings):
        grid = LoopbackGrid(app, {}, [{"partition-id": k} for k in range(3)])
        grid.faults = faults or {}
        strategy = FedPA(epochs=3, min_nodes=3, **settings)
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(fresh()), num_rounds=4)
        sampling = [m.content["config"]["fedpa-sampling"] for m in grid.sent]
        return result, sampling

    result, sampling = trained(rho=0.1, burn_in_rounds=2)
    assert sampling == [False] * 6 + [True] * 6
    arrays = result.arrays.to_numpy_ndarrays()
    assert loss(arrays, x, y) < 0.8 * loss(fresh(), x, y)
    assert result.train_metrics_clientapp[4]["rejected"] == 0
    again, _ = trained(rho=0.1, burn_in_rounds=2)
    for a, b in zip(arrays, again.arrays.to_numpy_ndarrays(), strict=True):
        np.testing.assert_array_equal(a, b)

    def with_nan(content):
        content["arrays"]["0"] = Array(np.full((20, 4), np.nan, np.float32))

    def many(content):
        content["metrics"]["num-examples"] = 10**18

    for fault in (with_nan, many, lambda content: content.clear(), 2):
        result, _ = trained({102: fault}, rho=0.1)
        assert result.train_metrics_clientapp[4]["rejected"] == 1
        assert np.isfinite(result.arrays.to_numpy_ndarrays()[0]).all()
    with pytest.raises(FedpaError, match="rho"):
        FedPA(rho=-1.0)


THETA = [np.full((2, 3), 10.0, np.float32), np.full(4, -10.0, np.float32)]
STEPS = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32) * 0.02


def private_run(work=lambda strategy: strategy, mods=(), rounds=1, sizes=(20, 20), **settings):
    """Two clients with the same data: the model that they end with."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp

    from fedpa.flower import FedPA
    from fedpa.numpy_client import reply
    from tests.flower.loopback_grid import LoopbackGrid

    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        steps = iter(STEPS)

        def epoch(arrays):
            step = next(steps)
            return [arrays[0] + step[:6].reshape(2, 3), arrays[1] + step[6:]]

        return reply(message, epoch, context.node_config["n"])

    strategy = work(FedPA(epochs=3, min_nodes=2, rho=0.5, **settings))
    grid = LoopbackGrid(app, {}, [{"n": n} for n in sizes])
    arrays = ArrayRecord(THETA)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds)
    return result.arrays.to_numpy_ndarrays()


def private(name):
    """Flower's way of clipping by a norm, with no noise: a wrapper of the strategy, and mods."""
    from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
    from flwr.serverapp import strategy as flower

    return {
        "server, fixed": lambda norm: (
            lambda s: flower.DifferentialPrivacyServerSideFixedClipping(s, 0.0, norm, 2),
            [],
        ),
        "client, fixed": lambda norm: (
            lambda s: flower.DifferentialPrivacyClientSideFixedClipping(s, 0.0, norm, 2),
            [fixedclipping_mod],
        ),
        "server, adaptive": lambda norm: (
            lambda s: flower.DifferentialPrivacyServerSideAdaptiveClipping(s, 0.0, 2, norm),
            [],
        ),
        "client, adaptive": lambda norm: (
            lambda s: flower.DifferentialPrivacyClientSideAdaptiveClipping(s, 0.0, 2, norm),
            [adaptiveclipping_mod],
        ),
        "local": lambda norm: (lambda s: s, [LocalDpMod(norm, 0.0, 1.0, 1e-5)]),
    }[name]


@pytest.mark.parametrize(
    "how", ["server, fixed", "client, fixed", "server, adaptive", "client, adaptive", "local"]
)
@pytest.mark.parametrize("burn_in_rounds", [0, 1])
def test_flowers_clipping_clips_delta_and_nothing_else(how, burn_in_rounds):
    """A model far from 0 that moves a little, in a burn-in round and in a sampling round."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    plain = private_run(burn_in_rounds=burn_in_rounds)
    wide = private_run(*private(how)(100.0), burn_in_rounds=burn_in_rounds)
    for a, b, start in zip(wide, plain, THETA, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-7)
        assert 1e-3 < np.abs(a - start).max() < 1
    narrow = private_run(*private(how)(0.01), burn_in_rounds=burn_in_rounds)
    moved, delta = (
        np.concatenate([(a - b).ravel() for a, b in zip(arrays, THETA, strict=True)])
        for arrays in (narrow, plain)
    )
    np.testing.assert_allclose(np.linalg.norm(moved), 0.01, rtol=1e-3)
    np.testing.assert_allclose(moved, delta * 0.01 / np.linalg.norm(delta), atol=2e-6)


@pytest.mark.parametrize("how", ["server, fixed", "client, adaptive"])
def test_flowers_noise_needs_equal_weights_and_no_server_optimizer(how):
    """Its noise is zC/m on the model: right only of a mean with equal weights, taken as it is."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    wrapped = private(how)(100.0)
    with refused("weighting = 'examples'"):
        private_run(*wrapped, sizes=(20, 30))
    with refused("server_optimizer = "):
        private_run(*wrapped, server_optimizer=fedpa.server.sgd(0.5, 0.9))
    uneven = private_run(*wrapped, sizes=(20, 30), weighting="uniform")
    for a, b in zip(uneven, private_run(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-7)
    private_run(sizes=(20, 30), server_optimizer=fedpa.server.sgd(0.5, 0.9))


def test_a_reply_is_a_model_with_the_arrays_that_were_sent():
    """Whole numbers too: Flower's mods ask for the same names."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedpa.numpy_client import reply

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    sent = ArrayRecord([np.full(3, 10.0, np.float32), np.array(7), np.ones(2, np.float64)])
    work = {"fedpa-sampling": False, "fedpa-epochs": 2, "fedpa-burn-in-epochs": 0, "fedpa-rho": 0.1}
    message = Message(RecordDict({"arrays": sent, "config": ConfigRecord(work)}), 5, "train")
    answer = reply(message, lambda arrays: [arrays[0] - 0.5, arrays[1] + 1, arrays[2] * 2], 9)
    found = answer.content["arrays"]
    assert list(found) == list(sent)
    for a, b in zip(found.to_numpy_ndarrays(), ([9.0] * 3, 7, [4.0] * 2), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [a.numpy().dtype for a in found.values()] == [a.numpy().dtype for a in sent.values()]


def test_a_round_starts_from_the_model_it_is_given():
    """Noise that a wrapper added after the last round stays in the model."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flwr.serverapp import strategy as flower

    class Shifting(flower.DifferentialPrivacyServerSideFixedClipping):
        def _add_noise_to_aggregated_arrays(self, arrays):
            from flwr.app import ArrayRecord

            return ArrayRecord([array + 5 for array in arrays.to_numpy_ndarrays()])

    def wrap(strategy):
        return Shifting(strategy, 1.0, 100.0, 2)

    plain, shifted = private_run(rounds=2), private_run(wrap, rounds=2)
    for a, b in zip(shifted, plain, strict=True):
        np.testing.assert_allclose(a, b + 10, atol=1e-5)


def test_what_clients_call_their_errors_and_metrics_is_shown_in_one_line():
    pytest.importorskip("flwr", reason="Flower is not installed")
    from flwr.app import Error, Message, MetricRecord, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from fedpa.flower import FedPA
    from tests.flower.loopback_grid import capture

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    forged = "gone\nfedpa: round 2: all is well\x1b[2J" + "x" * 2_000_000
    asked = [Message(RecordDict(), node, "train") for node in (5, 6)]
    for message in asked:
        message.metadata.__dict__["_message_id"] = "m"
    bad = Message(Error(2, forged), reply_to=asked[0])
    metrics = MetricRecord({"num-examples": 3, forged: 1.0})
    odd = Message(RecordDict({"metrics": metrics}), reply_to=asked[1])
    told, text = capture(lambda: FedPA().aggregate_evaluate(1, [bad, odd]))
    assert [len(name) <= 100 and name.isprintable() for name in told] == [True]
    assert len(text) < 1000
    assert [line for line in text.splitlines() if "all is well" in line] == [
        line for line in text.splitlines() if line.startswith("fedpa: round 1: node")
    ]
