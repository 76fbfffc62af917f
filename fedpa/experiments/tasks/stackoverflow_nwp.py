"""StackOverflow's next-word prediction: the next word of a user's sentences (appendix D).

10,000 words; a sentence is cut to 20 words between a begin and an end (`fedpa.data.text`).
The loss is the mean over the targets of a mini-batch, whichever sentence they are of. Accuracy
leaves out padding, unknown words, begin and end.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from fedpa.errors import find_name
from fedpa.experiments.catalogue import find_counts, open_dataset
from fedpa.experiments.hyperparameters import Hyperparameters
from fedpa.experiments.tasks.task import Preset, Task, TaskOptions, make_grid

if TYPE_CHECKING:
    from fedpa.training.problem import Problem

DATA = "stackoverflow"
SIZES = {"lstm": (96, 670), "small-lstm": (64, 128)}
"""Embedding and hidden units."""


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import map_examples
    from fedpa.data.text import PAD, inputs_and_targets, read_words
    from fedpa.experiments.models import lstm
    from fedpa.metrics.classification import next_words
    from fedpa.objectives.likelihood import Likelihood
    from fedpa.training.problem import Problem

    model = find_name("model", options.model or "lstm", SIZES, "model of stackoverflow-nwp")
    name = find_name("dataset", options.dataset or DATA, (DATA,), "data set of stackoverflow-nwp")
    splits = open_dataset(name, options.data_dir, features=["tokens"])
    vocabulary = read_words(find_counts(options.data_dir)[0], options.vocabulary or 10_000)

    def sentences(client: str, raw: dict[str, Any]) -> Any:
        del client
        return inputs_and_targets(raw["tokens"], vocabulary)

    return Problem(
        map_examples(splits.train, sentences, options.max_examples),
        lambda key: lstm.NextWordLSTM(vocabulary.size, *SIZES[model], key=key),
        lstm.loss,
        next_words(vocabulary.size),
        map_examples(splits.test, sentences),
        None if splits.validation is None else map_examples(splits.validation, sentences),
        dataset=name,
        sparse=lstm.SPARSE,
        weight=lstm.count_targets,
        likelihood=Likelihood(lstm.outputs, ignored=PAD),
    )


PAPER = Preset(
    1500,
    10,
    Hyperparameters(
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
    ),
    TaskOptions(max_examples=128, eval_split="test"),
    summary="appendix D of the FedPA paper",
    targets=(0.22, 0.23),
    last=100,
    grid=make_grid((0.01, 0.05, 0.1, 0.5, 1.0), (0.01, 0.05, 0.1)),
)

# Few rounds on few words: momentum at the server learns faster than Adam.
LAPTOP = Preset(
    120,
    20,
    dataclasses.replace(
        PAPER.hyperparameters,
        epochs=2,
        burn_in_rounds=60,
        client_learning_rate=1.0,
        server_optimizer="sgd",
        server_momentum=0.9,
    ),
    TaskOptions(model="small-lstm", max_examples=64, eval_examples=1_000),
    eval_every=5,
    summary="a small LSTM, 20 users a round, 120 rounds",
    targets=(0.08,),
    grid=make_grid((0.1, 0.5, 1.0), (0.1, 0.3, 1.0), (1, 2, 5), (30, 60, 90)),
)

TASK = Task(
    summary="the next of 10,000 words in users' sentences",
    load=load,
    presets={"laptop": LAPTOP, "paper": PAPER},
    takes=("data_dir", "dataset", "model", "max_examples", "vocabulary"),
    datasets=(DATA,),
    models={"small-lstm": 1_397_588, "lstm": 4_050_748},
)
