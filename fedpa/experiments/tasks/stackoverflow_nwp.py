"""StackOverflow's next-word prediction: the next word of a user's sentences (appendix D).

10,000 words; a sentence is cut to 20 words between a begin and an end (`fedpa.data.text`).
The loss is the mean over the targets of a mini-batch, whichever sentence they are of. Accuracy
leaves out padding, unknown words, begin and end.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from fedpa.errors import refuse
from fedpa.experiments.catalogue import find_counts, open_dataset
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.options import TaskOptions
from fedpa.experiments.tasks.task import Defaults, Preset, Task

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

SIZES = {"lstm": (96, 670), "small-lstm": (64, 128)}
"""Embedding and hidden units."""


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import map_examples
    from fedpa.data.text import inputs_and_targets, read_words
    from fedpa.experiments.models import lstm
    from fedpa.metrics.classification import next_words
    from fedpa.training.problem import Problem

    name = options.model or "lstm"
    if name not in SIZES:
        raise refuse("model", name, f"task stackoverflow-nwp has {', '.join(SIZES)}")
    if options.dataset not in (None, "stackoverflow"):
        raise refuse("dataset", options.dataset, "task stackoverflow-nwp has stackoverflow")
    splits = open_dataset("stackoverflow", options.data_dir, features=["tokens"])
    vocabulary = read_words(find_counts(options.data_dir)[0], options.vocabulary or 10_000)

    def sentences(client: str, raw: dict[str, Any]) -> Any:
        del client
        return inputs_and_targets(raw["tokens"], vocabulary)

    return Problem(
        map_examples(splits.train, sentences, options.max_examples),
        lambda key: lstm.NextWordLSTM(vocabulary.size, *SIZES[name], key=key),
        lstm.loss,
        next_words(vocabulary.size),
        map_examples(splits.test, sentences),
        None if splits.validation is None else map_examples(splits.validation, sentences),
        dataset="stackoverflow",
        sparse=lstm.SPARSE,
        weight=lstm.count_targets,
    )


PAPER = Hyperparameters(
    epochs=5,
    batch_size=16,
    burn_in_rounds=800,
    rho=0.01,
    client_learning_rate=0.1,
    server_optimizer="adam",
    server_learning_rate=1.0,
    server_b1=0.9,
    server_b2=0.99,
    server_tau=1e-3,
)


PAPER_RUN = Defaults(1500, 10, PAPER, TaskOptions(max_examples=128, eval_split="test"))

# Few rounds on few words: momentum at the server learns faster than Adam.
LAPTOP_RUN = Defaults(
    120,
    20,
    dataclasses.replace(
        PAPER,
        epochs=2,
        burn_in_rounds=60,
        client_learning_rate=1.0,
        server_optimizer="sgd",
        server_momentum=0.9,
    ),
    TaskOptions(model="small-lstm", max_examples=64, eval_examples=1_000),
    eval_every=5,
)


TASK = Task(
    summary="the next of 10,000 words in users' sentences",
    load=load,
    presets={
        "laptop": Preset(
            "a small LSTM, 20 users a round, 120 rounds", LAPTOP_RUN, (0.08,), last=10
        ),
        "paper": Preset("appendix D", PAPER_RUN, (0.22, 0.23), last=100),
    },
    compared=("fedavg-1", "fedavg", "fedpa", "mean-scaled"),
    metric="accuracy",
    takes=("data_dir", "dataset", "model", "max_examples", "vocabulary"),
    datasets=("stackoverflow",),
    models={"small-lstm": 1_397_588, "lstm": 4_050_748},
)
