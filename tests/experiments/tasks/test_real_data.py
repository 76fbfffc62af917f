"""The laptop presets clearly learn on real data: above what one guess for everybody achieves.

Needs the data sets of docs/results.md in the directory that FEDPA_DATA names; minutes each.
"""

import os

import jax
import pytest

from fedpa.experiments.catalogue import find_dataset
from fedpa.experiments.config import default_config, resolve
from fedpa.experiments.models.lstm import SPECIAL_IDS
from fedpa.experiments.run import run
from fedpa.experiments.tasks import task_named
from tests.metrics.guessing import most_frequent_label, most_frequent_tags, most_frequent_word

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("FEDPA_DATA" not in os.environ, reason="FEDPA_DATA is not set"),
    pytest.mark.filterwarnings("default"),
]


def trained(task):
    config = resolve(default_config(task, "fedavg"))
    if not any(find_dataset(name) for name in task_named(task).datasets):
        pytest.skip(f"FEDPA_DATA has no data for {task}")
    problem = task_named(task).load(config.task_options)
    last = run(config, None, problem=problem).history[-1]
    return problem, last[f"test/{task_named(task).metric}"]


def targets(data):
    return (data.examples(name)["y"] for name in data.ids)


def test_digits_by_writer():
    problem, accuracy = trained("emnist")
    assert most_frequent_label(targets(problem.test)) < 0.2
    assert accuracy >= 0.95


def test_cifar100_by_pachinko():
    problem, accuracy = trained("cifar100")
    assert accuracy >= 3 * most_frequent_label(targets(problem.test))


def test_next_words():
    problem, accuracy = trained("stackoverflow-nwp")
    model = jax.eval_shape(problem.init, jax.random.key(0))
    vocabulary = model.embedding.shape[0] - SPECIAL_IDS
    assert accuracy >= 1.5 * most_frequent_word(targets(problem.test), vocabulary)


def test_tags():
    """The five that are most frequent where clients train, which the file of counts names first."""
    problem, recall = trained("stackoverflow-lr")
    assert recall >= 2 * most_frequent_tags(targets(problem.test), guess=range(5))
