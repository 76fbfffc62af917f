"""EMNIST-62: handwritten characters by writer (section 5, appendix D).

28×28 pixels in [0, 1], the background 1.0, used as given; Reddi et al.'s convolutional network.
`--model mlp` is a perceptron of 128 hidden units, `--model logistic` one without: for many runs.
Their inputs are ink, 1 − pixel.
If only the digits are available (`fed_emnist_digitsonly`), there are ten classes.
"""

import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpa.errors import find_name, refuse
from fedpa.experiments.catalogue import find_first, open_dataset
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.task import Preset, Task, TaskOptions, make_grid

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

MODELS = {"cnn": 1_206_590, "mlp": 108_478, "logistic": 48_670}
"""Numbers of parameters."""
HIDDEN = {"mlp": 128, "logistic": 0}
"""Units of the models that are not convolutional."""
CLASSES = {"fed_emnist": 62, "fed_emnist_digitsonly": 10}


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import hold_out, map_examples
    from fedpa.data.partition import deal_by_label
    from fedpa.experiments.models import cnn, perceptron
    from fedpa.metrics.classification import classifier
    from fedpa.objectives.likelihood import Likelihood
    from fedpa.training.problem import Problem

    name = options.dataset or find_first(tuple(CLASSES), options.data_dir)
    name = find_name("dataset", name, CLASSES, "data set of task emnist")
    if options.dataset is None and name != "fed_emnist":
        warnings.warn(
            f"fed_emnist is not here, {name} is: {CLASSES[name]} classes, not 62",
            stacklevel=2,
        )
    model = find_name("model", options.model or "cnn", MODELS, "model of task emnist")
    splits = open_dataset(name, options.data_dir)

    def images(client: str, raw: dict[str, np.ndarray]) -> Any:
        del client
        pixels = raw["pixels"].astype(np.float32)[..., None]
        return {
            "x": pixels if model == "cnn" else 1 - pixels,
            "y": raw["label"].astype(np.int32),
        }

    train = map_examples(splits.train, images, options.max_examples)
    if options.label_skew is not None:
        train = deal_by_label(train, "y", options.label_skew, options.partition_seed or 0)
    elif options.partition_seed is not None:
        raise refuse("partition_seed", options.partition_seed, "needs --label-skew")
    clients, validation = hold_out(train, options.validation_share or 0.0)
    classes = CLASSES[name]
    problem = Problem(
        clients,
        lambda key: cnn.CNN(classes, key=key),
        cnn.loss,
        classifier(lambda params, x: params(x)),
        map_examples(splits.test, images),
        validation,
        dataset=name,
        likelihood=Likelihood(lambda params, batch: params(batch["x"])),
    )
    if model == "cnn":
        return problem
    return problem._replace(
        init=functools.partial(perceptron.init, pixels=784, hidden=HIDDEN[model], classes=classes),
        loss=perceptron.loss,
        metric=classifier(perceptron.logits),
        likelihood=Likelihood(lambda params, batch: perceptron.logits(params, batch["x"])),
    )


# Curves show all of the test split, which has fewer examples than that.
PAPER = Preset(
    1500,
    100,
    Hyperparameters(
        epochs=5,
        batch_size=20,
        burn_in_rounds=100,
        rho=0.1,
        client_learning_rate=0.01,
        client_momentum=0.9,
        server_learning_rate=0.5,
        server_momentum=0.9,
    ),
    TaskOptions(model="cnn", eval_split="test", eval_examples=100_000),
    summary="appendix D of the FedPA paper",
    targets=(0.84, 0.86),
    last=100,
    grid=make_grid((0.01, 0.05, 0.1, 0.5, 1.0, 5.0), (0.001, 0.005, 0.01, 0.05, 0.1)),
)

LAPTOP = Preset(
    50,
    10,
    dataclasses.replace(PAPER.hyperparameters, burn_in_rounds=25),
    TaskOptions(model="cnn", validation_share=0.1, eval_examples=2_000),
    eval_every=2,
    summary="10 writers a round, 50 rounds",
    targets=(0.9, 0.95),
    grid=make_grid((0.1, 0.5, 1.0), (0.001, 0.005, 0.01, 0.05), (2, 5), (10, 20, 30)),
)

TASK = Task(
    summary="handwritten characters by writer (or digits only, if that is the data you have)",
    load=load,
    presets={"laptop": LAPTOP, "paper": PAPER},
    takes=(
        "data_dir",
        "dataset",
        "model",
        "max_examples",
        "label_skew",
        "partition_seed",
        "validation_share",
    ),
    datasets=tuple(CLASSES),
    models=MODELS,
)
