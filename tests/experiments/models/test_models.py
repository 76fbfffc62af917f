"""The benchmarks' models have the sizes the paper reports; ours, the sizes we gave them."""

import equinox as eqx
import jax
import pytest

from fedpa.experiments.models import CNN, BagOfWords, NextWordLSTM, resnet18, small_resnet
from fedpa.experiments.models.perceptron import init
from fedpa.experiments.tasks import tasks
from fedpa.experiments.tasks.stackoverflow_nwp import SIZES

MODELS = {
    "bag-of-words": (lambda key: BagOfWords(key=key), 5_000_500),
    "cnn": (lambda key: CNN(key=key), 1_206_590),
    "logistic": (lambda key: init(key, 784, 0, 62), 48_670),
    "lstm": (lambda key: NextWordLSTM(key=key), 4_050_748),
    "mlp": (lambda key: init(key, 784, 128, 62), 108_478),
    "perceptron": (init, 2_410),
    "resnet18": (lambda key: resnet18(key=key), 11_227_812),
    "small-lstm": (lambda key: NextWordLSTM(10_000, *SIZES["small-lstm"], key=key), 1_397_588),
    "small-resnet": (lambda key: small_resnet(key=key), 183_004),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts(name):
    make, parameters = MODELS[name]
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    arrays = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    assert sum(leaf.size for leaf in jax.tree.leaves(arrays)) == parameters


def test_tasks_tell_the_sizes_of_their_models():
    told = {name: size for task in tasks().values() for name, size in task.models.items()}
    assert told == {name: parameters for name, (_, parameters) in MODELS.items()}
