"""StackOverflow's tag prediction: 500 logistic regressions on bags of 10,000 words (appendix D).

A bag is the mean of the one-hots of a post's words, kept as its few words
(`fedpa.data.text`). The loss is a mean over tags and a *sum* over the mini-batch, which is
why the client's rate is 50.
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


def load(options: TaskOptions) -> "Problem":
    from fedpa.data import map_examples
    from fedpa.data.text import WIDTH, make_bags, read_tags, read_words
    from fedpa.experiments.models import bag_of_words
    from fedpa.metrics.classification import tagger
    from fedpa.objectives.likelihood import Likelihood
    from fedpa.training.problem import Problem

    name = find_name("dataset", options.dataset or DATA, (DATA,), "data set of stackoverflow-lr")
    splits = open_dataset(name, options.data_dir, features=["tokens", "title", "tags"])
    word_counts, tag_counts = find_counts(options.data_dir)
    vocabulary = read_words(word_counts, options.vocabulary or 10_000)
    tag_set = read_tags(tag_counts, options.tags or 500)
    width = options.words or WIDTH

    def posts(client: str, raw: dict[str, Any]) -> Any:
        del client
        return make_bags(raw["tokens"], raw["title"], raw["tags"], vocabulary, tag_set, width)

    return Problem(
        map_examples(splits.train, posts, options.max_examples),
        lambda key: bag_of_words.BagOfWords(vocabulary.size, tag_set.size, key=key),
        bag_of_words.loss,
        tagger(),
        map_examples(splits.test, posts),
        None if splits.validation is None else map_examples(splits.validation, posts),
        reduction="sum",
        dataset=name,
        sparse=bag_of_words.SPARSE,
        eval_batch_size=500,
        likelihood=Likelihood(bag_of_words.outputs, link="sigmoid"),
    )


PAPER = Preset(
    1500,
    10,
    Hyperparameters(
        epochs=5,
        batch_size=100,
        burn_in_rounds=800,
        rho=0.01,
        client_learning_rate=50.0,
        client_momentum=0.9,
        server_optimizer="adagrad",
        server_learning_rate=5.0,
        server_tau=1e-5,
    ),
    TaskOptions(max_examples=1_000, eval_split="test"),
    summary="appendix D of the FedPA paper",
    targets=(0.6, 0.65),
    last=100,
    grid=make_grid((0.1, 0.5, 1.0, 5.0, 10.0), (1.0, 5.0, 10.0, 50.0, 100.0)),
)

# Without momentum rows of words that a client does not use stay untouched, which is faster.
# Adagrad's steps on ten users are noisy: a mean of iterates is what is worth evaluating.
LAPTOP = Preset(
    800,
    10,
    dataclasses.replace(
        PAPER.hyperparameters,
        burn_in_rounds=400,
        client_momentum=0.0,
        iterate_averaging="exponential:0.98",
    ),
    TaskOptions(max_examples=128, eval_examples=1_000),
    eval_every=5,
    summary="10 users a round, 800 rounds",
    targets=(0.6,),
    last=100,
    grid=make_grid((0.5, 1.0, 5.0), (5.0, 10.0, 50.0, 100.0), (2, 5), (200, 400, 600)),
)

TASK = Task(
    summary="predict which of 500 tags a post has, from its words",
    load=load,
    presets={"laptop": LAPTOP, "paper": PAPER},
    metric="recall_at_5",
    takes=("data_dir", "dataset", "max_examples", "vocabulary", "tags", "words"),
    datasets=(DATA,),
    models={"bag-of-words": 5_000_500},
)
