"""FedPA as a Flower strategy, for apps with their own model and training step.

Clients reply with `fedpa.numpy_client.reply`; nothing else of the app changes. For the tasks and
methods of `fedpa`, with many clients per node, checkpoints and resuming, use `server_app` and
`client_app`.
"""

import math
import time
from collections.abc import Iterable, Sequence
from logging import INFO, WARNING
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.supercore import log

from fedpa.errors import FedpaError, check_integer, check_number, refuse
from fedpa.flower import wire
from fedpa.flower.roster import LARGEST_CLIENT
from fedpa.numpy_client import ClientWork, check_work, describe_work, is_trained
from fedpa.server.aggregation import Weighting, check_weighting
from fedpa.server.optimizers import sgd
from fedpa.server.update import Server, ServerState, init, update

Usable = tuple[int, dict[str, np.ndarray], dict[str, float]]
"""A reply's n_i, Δ_i and metrics."""


class FedPA(FedAvg):
    """FedPA as a Flower strategy: θ ← ServerOpt(θ, Σ n_i Δ̂_i / Σ n_i) (Algorithm 1).

    Nodes compute Δ̂_i (eq. 4, Algorithm 3) by `fedpa.numpy_client.reply`.

    Clients reply with a model, θ − Δ, from which Δ is computed here. That is what Flower's wrappers
    and mods for differential privacy expect: they clip Δ, and add noise to the new model, with
    which the next round starts. Choose the clipping norm for Δ̂, which in sampling rounds is up to
    1 + (ℓ−1)ρ times as long as θ − x̄. Their noise is for a mean with equal weights that the server
    takes as it is: inside another strategy, clients of different weights need
    `weighting="uniform"`, and another server optimizer is refused. Rounding θ − Δ to float32
    changes each coordinate of Δ by at most 2⁻²⁴ |θ − Δ|, as rounding the new θ does.

    Args:
        rho: Shrinkage ρ ≥ 0; default: 0.1.
        epochs: A client's epochs in a round, ≥ 1; default: 5.
        burn_in_epochs: Epochs before a client's first sample, below `epochs`; default: 0.
        burn_in_rounds: Rounds that are FedAvg's, ≥ 0; default: 0.
        server_optimizer: Any of optax; default: `fedpa.server.sgd(1.0)`.
        weighting: q_i: "examples", n_i, or "uniform", 1; default: "examples".
        largest_ratio: Largest n_i that counts, ≥ 1, as a multiple of the median of a round's, since
            n_i is what a client says; default: 10.
        fraction_train: The share of the nodes that take part in a round, 0 to 1, drawn by `seed`
            from their numbers, which Flower chooses when a node starts; default: 1.
        fraction_evaluate: As in Flower's FedAvg, weighted by examples; default: 0.
        min_nodes: How many nodes must be connected for the first round, ≥ 1; default: 2.
        min_success: The share of a round's nodes, 0 to 1, that must give a usable reply; otherwise
            the model is left unchanged; default: 0.
        start_timeout: Seconds to wait for `min_nodes`; default: 60.
        seed: Of the nodes drawn, ≥ 0; default: 0.
    Raises:
        FedpaError: A setting is out of its range.
    Example:
        >>> strategy = fedpa.flower.FedPA(rho=0.1, epochs=5, burn_in_rounds=10, min_nodes=3)
        >>> strategy.work.epochs  # strategy.start(grid, initial_arrays) in a ServerApp
        5
    """

    def __init__(
        self,
        *,
        rho: float = 0.1,
        epochs: int = 5,
        burn_in_epochs: int = 0,
        burn_in_rounds: int = 0,
        server_optimizer: optax.GradientTransformation | None = None,
        weighting: Weighting = "examples",
        largest_ratio: float = 10.0,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_nodes: int = 2,
        min_success: float = 0.0,
        start_timeout: float = 60.0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=1,
        )
        self.work = ClientWork(True, epochs, burn_in_epochs, float(rho))
        check_work(self.work)
        check_weighting(weighting)
        check_number("largest_ratio", largest_ratio, 1.0)
        check_integer("burn_in_rounds", burn_in_rounds, 0)
        check_integer("min_nodes", min_nodes, 1)
        check_integer("seed", seed, 0)
        for name, share in (("fraction_train", fraction_train), ("min_success", min_success)):
            if not 0 <= share <= 1:
                raise refuse(name, share, "must be a share between 0 and 1")
        self.burn_in_rounds, self.seed = burn_in_rounds, seed
        self.largest_ratio = largest_ratio
        self.min_nodes, self.min_success, self.start_timeout = min_nodes, min_success, start_timeout
        self.server = Server(sgd(1.0) if server_optimizer is None else server_optimizer, weighting)
        self.has_own_optimizer = server_optimizer is not None
        self.is_inside = True
        """Whether another strategy runs the rounds, as Flower's wrappers do."""
        self.state: ServerState | None = None
        self._given = ArrayRecord()
        self._asked = 0

    def start(self, *args: Any, **options: Any) -> Result:
        """Run the rounds, as in Flower's strategies."""
        self.is_inside = False
        return super().start(*args, **options)

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> FedPA: %s", self.work)
        log(INFO, "\t└──> burn-in rounds: %d", self.burn_in_rounds)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The same message for each of the round's nodes."""
        if self.is_inside and self.has_own_optimizer:
            expected = (
                "not inside another strategy: the noise of Flower's differential privacy is for "
                "an average that is taken as it is. Leave it out"
            )
            raise refuse("server_optimizer", type(self.server.optimizer).__name__, expected)
        theta = _floats(arrays)
        if not theta:
            raise FedpaError("initial_arrays has no floating-point arrays: nothing can be trained")
        given = {name: jnp.asarray(array) for name, array in theta.items()}
        if self.state is None or server_round == 1:
            self.state = init(self.server, given)
        # A wrapper may have changed what the last round gave: noise is part of the model.
        self.state = self.state._replace(theta=given)
        self._given = arrays
        nodes = self._wait_for_nodes(grid, self.min_nodes if server_round == 1 else 1)
        size = max(round(self.fraction_train * len(nodes)), 1)
        rng = np.random.default_rng([self.seed, server_round])
        chosen = [nodes[k] for k in sorted(rng.choice(len(nodes), size, replace=False))]
        self._asked = size
        work = self.work._replace(sampling=server_round > self.burn_in_rounds)
        asked = dict(config) | {"server-round": server_round} | describe_work(work)
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord(asked)})
        group = str(server_round)
        return [Message(content, node, MessageType.TRAIN, group_id=group) for node in chosen]

    def _wait_for_nodes(self, grid: Grid, least: int) -> list[int]:
        """Wait until that many nodes are connected, and list them."""
        deadline = time.monotonic() + self.start_timeout
        while len(nodes := sorted(grid.get_node_ids())) < least:
            if time.monotonic() > deadline:
                waited = f"after start_timeout = {self.start_timeout:g} s"
                raise FedpaError(f"min_nodes = {least}: {len(nodes)} are connected {waited}")
            time.sleep(min(1.0, self.start_timeout))
        return nodes

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Σ n_i Δ_i / Σ n_i as a gradient; what can't be used is named and left out."""
        assert self.state is not None
        theta = _floats(self._given)
        usable: list[Usable] = []
        for message in sorted(replies, key=lambda message: message.metadata.src_node_id):
            try:
                with wire.reading():
                    usable.append(_read_reply(message, theta))
            except wire.WireError as error:
                _log_left_out(server_round, message, error)
        usable = self._weigh(usable)
        rejected = self._asked - len(usable)
        weight = sum(n for n, _, _ in usable)
        if len(usable) < self.min_success * self._asked or not weight:
            log(WARNING, "fedpa: round %d: model left unchanged", server_round)
            return None, MetricRecord({"rejected": rejected})
        mean = {}
        for name, array in theta.items():
            total = sum(n * delta[name] for n, delta, _ in usable)
            mean[name] = jnp.asarray(np.asarray(total / weight, array.dtype))
        self.state, info = update(self.server, self.state, mean, jnp.asarray(float(weight)))
        new = {
            name: np.asarray(self.state.theta[name], array.dtype) for name, array in theta.items()
        }
        names = dict.fromkeys(name for _, _, metrics in usable for name in metrics)
        averages = {
            name: sum(n * metrics.get(name, 0.0) for n, _, metrics in usable) / weight
            for name in names
        }
        numbers: dict[str, Any] = {**averages, "rejected": rejected, "skipped": int(info.skipped)}
        return ArrayRecord(dict(self._given) | dict(wire.pack(new))), MetricRecord(numbers)

    def _weigh(self, usable: Sequence[Usable]) -> list[Usable]:
        """Replace n_i by q_i."""
        if self.server.weighting == "uniform":
            return [(int(n > 0), delta, metrics) for n, delta, metrics in usable]
        counts = {n for n, _, _ in usable}
        if self.is_inside and len(counts) > 1:
            expected = (
                f"replies have {min(counts)} to {max(counts)} examples, and the noise of Flower's "
                "differential privacy is for equal weights: give weighting='uniform'"
            )
            raise refuse("weighting", "examples", expected)
        usual = float(np.median([n for n, _, _ in usable if n > 0] or [1]))
        largest = math.ceil(self.largest_ratio * usual)
        return [(min(n, largest), delta, metrics) for n, delta, metrics in usable]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the nodes' metrics, weighted by examples; errors are logged and left out."""
        usable = []
        for message in replies:
            if message.has_error():
                _log_left_out(server_round, message, wire.describe_error(message.error))
                continue
            for name, record in list(message.content.metric_records.items()):
                shown = {wire.escape_text(key, 100): value for key, value in record.items()}
                message.content[name] = MetricRecord(shown)
            usable.append(message)
        return super().aggregate_evaluate(server_round, usable)


def _log_left_out(server_round: int, message: Message, why: object) -> None:
    node = message.metadata.src_node_id
    log(WARNING, "fedpa: round %d: node %d is left out: %s", server_round, node, why)


def _floats(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays that are trained."""
    return {name: a for name, array in arrays.items() if is_trained(a := array.numpy())}


def _read_reply(
    message: Message, theta: dict[str, np.ndarray]
) -> tuple[int, dict[str, np.ndarray], dict[str, float]]:
    """Read a client's n, Δ in float64 and metrics; refuses an invalid reply."""
    if message.has_error():
        raise wire.WireError(wire.describe_error(message.error))
    arrays, metrics = message.content.get(wire.ARRAYS), message.content.get(wire.METRICS)
    if not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
        raise wire.WireError(
            "the reply has no records arrays and metrics: use fedpa.numpy_client.reply"
        )
    n: Any = metrics.get("num-examples")
    wire.check_count("num-examples", n, LARGEST_CLIENT)
    delta = {}
    for name, wanted in theta.items():
        array = wire.read_array(arrays, name, wanted)
        wire.check_finite(name, array)
        delta[name] = wanted.astype(np.float64) - array
    numbers = {
        wire.escape_text(name, 100): float(value)
        for name, value in metrics.items()
        if name != "num-examples" and isinstance(value, int | float)
    }
    return n, delta, numbers
