"""CIFAR-100 with 500 clients by Pachinko allocation (section 5, appendix D).

Every image is cropped to 24×24 at random and flipped, each by its own draw, then standardised,
inside the compiled step; evaluation takes the centre. The model is ResNet-18 with group norm, or a
small one for laptops. L2 1e-4 on kernels and the last layer.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpa.errors import find_name, refuse
from fedpa.experiments.catalogue import find_dataset, open_dataset
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.task import Preset, Task, TaskOptions, make_grid

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

MODELS = {"small-resnet": 183_004, "resnet18": 11_227_812}
"""Numbers of parameters."""


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import hold_out, map_examples
    from fedpa.experiments.models import resnet
    from fedpa.metrics.classification import classifier
    from fedpa.objectives.likelihood import Likelihood
    from fedpa.training.problem import Problem

    name = find_name("model", options.model or "resnet18", MODELS, "model of task cifar100")
    make = resnet.resnet18 if name == "resnet18" else resnet.small_resnet
    groups = {} if options.groups is None else {"groups": options.groups}

    dataset = _dataset(options)
    splits = open_dataset("fed_cifar100", options.data_dir, options.partition_seed or 0)

    def images(client: str, raw: dict[str, np.ndarray]) -> Any:
        del client
        return {"x": raw["image"].astype(np.uint8), "y": raw["label"].astype(np.int32)}

    clients, validation = hold_out(
        map_examples(splits.train, images, options.max_examples), options.validation_share or 0.0
    )
    return Problem(
        clients,
        lambda key: make(key=key, **groups),
        resnet.loss,
        classifier(lambda params, x: params(x)),
        map_examples(splits.test, images),
        validation,
        regularizer=resnet.regularizer,
        dataset=dataset,
        likelihood=Likelihood(lambda params, batch: params(batch["x"])),
    )


def _dataset(options: TaskOptions) -> str:
    """Open the published federation if it is available; otherwise partition CIFAR-100."""
    central = find_dataset("cifar-100-binary", options.data_dir)
    there = find_dataset("fed_cifar100", options.data_dir)
    dataset = "cifar-100-binary" if there is None or there == central else "fed_cifar100"
    if options.dataset not in (None, dataset):
        raise refuse("dataset", options.dataset, f"{dataset} is what would be opened")
    if dataset == "fed_cifar100" and options.partition_seed is not None:
        raise refuse(
            "partition_seed", options.partition_seed, f"{there} already has clients: leave it out"
        )
    return dataset


PAPER = Preset(
    1500,
    20,
    Hyperparameters(
        epochs=10,
        batch_size=20,
        burn_in_rounds=400,
        rho=0.01,
        client_learning_rate=0.01,
        client_momentum=0.9,
        server_learning_rate=0.5,
        server_momentum=0.9,
    ),
    TaskOptions(model="resnet18", eval_split="test"),
    summary="appendix D of the FedPA paper",
    targets=(0.3, 0.4),
    last=100,
    grid=make_grid((0.01, 0.05, 0.1, 0.5, 1.0, 5.0), (0.001, 0.005, 0.01, 0.05, 0.1)),
)

# In so few rounds momentum at the server overshoots: it stays near chance.
LAPTOP = Preset(
    60,
    20,
    dataclasses.replace(
        PAPER.hyperparameters,
        epochs=3,
        burn_in_rounds=30,
        client_learning_rate=0.03,
        server_learning_rate=1.0,
        server_momentum=0.0,
    ),
    TaskOptions(model="small-resnet", validation_share=0.1, eval_examples=2_000),
    eval_every=4,
    summary="a small ResNet, 20 clients a round, 60 rounds",
    targets=(0.05,),
    grid=make_grid((0.1, 0.5, 1.0), (0.003, 0.01, 0.03, 0.1), (1, 3, 5), (10, 20, 30, 40)),
)

TASK = Task(
    summary="images of 100 classes, 500 clients by Pachinko allocation",
    load=load,
    presets={"laptop": LAPTOP, "paper": PAPER},
    takes=(
        "data_dir",
        "dataset",
        "model",
        "groups",
        "max_examples",
        "partition_seed",
        "validation_share",
    ),
    datasets=("fed_cifar100", "cifar-100-binary"),
    models=MODELS,
)
