"""Flower's simulation engine on Ray, clients in PyTorch. `python flower_peer.py SPEC.json`.

As many clients at a time as there are cores, one core each: Ray's usual set-up.
"""

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import numpy as np

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns of a default that it will change; it is for accelerators, which are not used.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import torch
import torch_models
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


@functools.cache
def load_spec(path: str) -> tuple[dict, dict[str, np.ndarray], torch.Tensor, torch.Tensor]:
    """Spec and data, read once by every process."""
    with open(path) as file:
        spec = json.load(file)
    arrays = dict(np.load(spec["data"]))
    return spec, arrays, *torch_models.tensors(spec["model"], arrays)


def train_client(path: str, message: Message, context: Context) -> Message:
    """One client's local epochs, from the arrays of the message."""
    spec, arrays, x, y = load_spec(path)
    module = torch_models.build(spec["model"], arrays)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    torch_models.train(module, x[client], y[client], spec)
    content = RecordDict(
        {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": len(x[client])}),
        }
    )
    return Message(content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when a round starts and when its average is there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.seconds: list[float] = []
        self.started = 0.0

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        self.started = time.perf_counter()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        good = sum(not reply.has_error() for reply in replies)
        if good < self.min_train_nodes:
            raise RuntimeError(f"round {server_round}: {good} of {self.min_train_nodes} clients")
        answer = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self.started)
        return answer


def simulate(path: str) -> dict[str, Any]:
    spec, arrays, x, y = load_spec(path)
    torch.manual_seed(spec["seed"])
    module = torch_models.build(spec["model"], arrays)
    # The fraction is taken of the nodes there are when the first round begins, and they may still
    # be registering: only the minimum makes sure that everyone takes part.
    strategy = Timed(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=len(x),
        min_available_nodes=len(x),
    )
    server, client = ServerApp(), ClientApp()

    @server.main()
    def serve(grid: Grid, _: Context) -> None:
        rounds = spec["warmup"] + spec["rounds"]
        start = ArrayRecord(module.state_dict())
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=rounds)
        module.load_state_dict(result.arrays.to_torch_state_dict())

    client.train()(functools.partial(train_client, path))
    scratch = tempfile.mkdtemp(prefix="ray-")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        run_simulation(
            server,
            client,
            num_supernodes=len(x),
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                "init_args": {
                    "num_cpus": cores,
                    "_temp_dir": scratch,
                    "log_to_driver": False,
                    "logging_level": "ERROR",
                },
            },
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "seconds": strategy.seconds[spec["warmup"] :],
        "warmup": strategy.seconds[: spec["warmup"]],
        "loss": torch_models.mean_loss(module, x, y),
        "versions": {name: version(name) for name in ("flwr", "ray", "torch")},
    }


if __name__ == "__main__":
    # Imported under its own name, the client is sent to Ray's workers by reference, and they keep
    # the data they have read from one round to the next.
    import flower_peer

    print(json.dumps(flower_peer.simulate(sys.argv[1])))
