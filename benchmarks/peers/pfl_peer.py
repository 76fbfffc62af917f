"""pfl-research on PyTorch: FedAvg rounds. `python pfl_peer.py SPEC.json`."""

import asyncio
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch_models
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Clock(TrainingProcessCallback):
    """Wall time from the end of one central iteration to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.last = time.perf_counter()
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        return False, Metrics()


def federation(x: torch.Tensor, y: torch.Tensor) -> FederatedDataset:
    """Every client once a round, its examples in a new order. (pfl itself does not shuffle.)"""

    def client(number: int) -> Dataset:
        order = torch.randperm(len(x[number]))
        return Dataset([x[number][order], y[number][order]], user_id=number)

    return FederatedDataset(client, MinimizeReuseUserSampler(list(range(len(x)))))


def with_metrics(module: torch.nn.Module) -> torch.nn.Module:
    """pfl asks for metrics in the first iteration, which is one of the warm-up."""

    def metrics(x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(float(module.loss(x, y)) * len(x), len(x))}

    module.metrics = metrics
    return module


def main(path: str) -> None:
    with open(path) as file:
        spec = json.load(file)
    arrays = dict(np.load(spec["data"]))
    torch.manual_seed(spec["seed"])
    module = with_metrics(torch_models.build(spec["model"], arrays))
    x, y = torch_models.tensors(spec["model"], arrays)
    asyncio.set_event_loop(asyncio.new_event_loop())  # pfl expects one to be there
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    rounds = spec["warmup"] + spec["rounds"]
    data = federation(x, y)
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=len(x),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_batch_size=spec["batch_size"],
            local_num_epochs=spec["epochs"],
            local_learning_rate=spec["learning_rate"],
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    report = {
        "seconds": clock.seconds[spec["warmup"] :],
        "warmup": clock.seconds[: spec["warmup"]],
        "loss": torch_models.mean_loss(module, x, y),
        "versions": {"pfl": version("pfl"), "torch": torch.__version__},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
