"""CIFAR-100 dealt to 500 clients by the Pachinko allocation (section 5, appendix D).

Every image is cropped to 24×24 at random and flipped, each by its own draw, then standardised,
inside the compiled step; evaluation takes the centre. The model is ResNet-18 with group norm, or a
small one for laptops. L2 1e-4 on kernels and the last layer.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpa.errors import refuse
from fedpa.experiments.catalogue import find_dataset, open_dataset
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import Defaults, Preset, Task

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

MODELS = {"small-resnet": 183_004, "resnet18": 11_227_812}
"""Numbers of parameters."""


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import hold_out, map_examples
    from fedpa.experiments.models import resnet18, small_resnet
    from fedpa.metrics.classification import classifier
    from fedpa.training.problem import Problem

    name = options.model or "resnet18"
    if name not in MODELS:
        raise refuse("model", name, f"task cifar100 has {', '.join(MODELS)}")
    module: Any = resnet18 if name == "resnet18" else small_resnet
    build = resnet18.ResNet18 if name == "resnet18" else small_resnet.SmallResNet
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
        lambda key: build(key=key, **groups),
        module.loss,
        classifier(lambda params, x: params(x)),
        map_examples(splits.test, images),
        validation,
        regularizer=module.regularizer,
        dataset=dataset,
    )


def _dataset(options: TaskOptions) -> str:
    """The federation as published, where it is found, or CIFAR-100 itself, which is dealt."""
    central = find_dataset("cifar-100-binary", options.data_dir)
    there = find_dataset("fed_cifar100", options.data_dir)
    dataset = "cifar-100-binary" if there is None or there == central else "fed_cifar100"
    if options.dataset not in (None, dataset):
        raise refuse("dataset", options.dataset, f"{dataset} is what would be opened")
    if dataset == "fed_cifar100" and options.partition_seed is not None:
        raise refuse(
            "partition_seed", options.partition_seed, f"{there} is dealt already: leave it out"
        )
    return dataset


PAPER = Hyperparameters(
    epochs=10,
    batch_size=20,
    burn_in_rounds=400,
    rho=0.01,
    client_learning_rate=0.01,
    client_momentum=0.9,
    server_learning_rate=0.5,
    server_momentum=0.9,
)


PAPER_RUN = Defaults(1500, 20, PAPER, TaskOptions(model="resnet18", eval_split="test"))

# In so few rounds momentum at the server overshoots: it stays near chance.
LAPTOP_RUN = Defaults(
    60,
    20,
    dataclasses.replace(
        PAPER,
        epochs=3,
        burn_in_rounds=30,
        client_learning_rate=0.03,
        server_learning_rate=1.0,
        server_momentum=0.0,
    ),
    TaskOptions(model="small-resnet", validation_share=0.1, eval_examples=2_000),
    eval_every=4,
)


TASK = Task(
    summary="images of 100 classes, 500 clients by Pachinko allocation",
    load=load,
    presets={
        "laptop": Preset(
            "a small ResNet, 20 clients a round, 60 rounds", LAPTOP_RUN, (0.05,), last=10
        ),
        "paper": Preset("appendix D", PAPER_RUN, (0.3, 0.4), last=100),
    },
    compared=("fedavg-1", "fedavg", "fedpa", "mean-scaled"),
    metric="accuracy",
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
