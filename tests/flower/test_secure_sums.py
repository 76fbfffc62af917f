"""FedPA's clients under Flower's SecAgg+: the server sees the sum of their models, and no model."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import Key
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from fedpa.numpy_client import ClientWork, client_delta
from tests.flower.loopback_grid import LoopbackGrid, capture

SIZES = (4, 8, 12)
ROUNDS, CLIPPING = 3, 8.0
WORK = {"sampling": True, "epochs": 4, "burn_in_epochs": 0, "rho": 0.1}


def make_epoch(partition):
    """Steps of least squares towards a client's own optimum."""
    rng = np.random.default_rng(partition)
    x, y = rng.normal(size=(6, 3)), rng.normal(size=6)

    def epoch(arrays):
        (theta,) = arrays
        for row, value in zip(x, y, strict=True):
            theta = theta - 0.05 * row * (row @ theta - value)
        return [theta]

    return epoch


class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        deltas = client_delta(parameters, make_epoch(self.partition), ClientWork(**config))
        after = [theta - delta for theta, delta in zip(parameters, deltas, strict=True)]
        return after, SIZES[self.partition], {}


app = ClientApp(
    client_fn=lambda context: Client(context.node_config["partition-id"]).to_client(),
    mods=[secaggplus_mod],
)


class Grid(LoopbackGrid):
    """Each node has a copy of its message, as over a network; what the server receives is kept."""

    def push_messages(self, messages):
        for message in messages:
            message.content = copy.deepcopy(message.content)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        messages = super().pull_messages(message_ids)
        self.received = [*getattr(self, "received", []), *messages]
        return messages


def run_secure():
    """(parameters after each round, what the server received)."""
    seen = []
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=3,
        min_available_clients=3,
        on_fit_config_fn=lambda t: WORK,
        initial_parameters=ndarrays_to_parameters([np.zeros(3)]),
        evaluate_fn=lambda t, arrays, config: seen.append(arrays[0].copy()),
    )
    nodes = [{"partition-id": k, "num-partitions": 3} for k in range(3)]
    grid = Grid(app, {}, nodes)
    grid.set_run(SimpleNamespace(run_id=1))
    context = Context(1, 1, {}, RecordDict(), {})
    legacy = LegacyContext(context, ServerConfig(num_rounds=ROUNDS), strategy)
    secure = SecAggPlusWorkflow(3, 2, max_weight=float(max(SIZES)), clipping_range=CLIPPING)
    workflow = DefaultWorkflow(secure)
    capture(lambda: workflow(grid, legacy))
    return seen, grid


def run_plainly():
    theta, seen = np.zeros(3), [np.zeros(3)]
    for _ in range(ROUNDS):
        deltas = [client_delta([theta], make_epoch(k), ClientWork(**WORK))[0] for k in range(3)]
        theta = theta - np.average(deltas, axis=0, weights=SIZES)
        seen.append(theta)
    return seen


def test_secure_sums_give_fedpa_up_to_the_rounding_of_models():
    """Of 2²² steps in [−8, 8], larger by as much as a client weighs less than it may."""
    step = 2 * CLIPPING / 2**22 * max(SIZES) / min(SIZES)
    seen, _ = run_secure()
    for one, other in zip(seen, run_plainly(), strict=True):
        np.testing.assert_allclose(one, other, atol=ROUNDS * step, rtol=0)
    assert np.abs(seen[-1]).max() > 0.05


def test_no_reply_has_a_clients_model():
    """What it has instead are other numbers in every run of the same clients."""
    runs = [run_secure()[1].received for _ in range(2)]
    masked = []
    for messages in runs:
        arrays = [array for m in messages for r in m.content.array_records.values() for array in r]
        assert not arrays
        vectors = [
            np.frombuffer(data, np.uint8)
            for message in messages
            for record in message.content.config_records.values()
            for data in record.get(Key.MASKED_PARAMETERS, [])
        ]
        assert vectors
        masked.append(vectors)
    for one, other in zip(*masked, strict=True):
        assert one.shape != other.shape or (one != other).any()
