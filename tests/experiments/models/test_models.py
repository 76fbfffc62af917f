"""The benchmarks' models have the sizes the paper reports; ours, the sizes we gave them."""

import equinox as eqx
import jax
import pytest

from fedpa.experiments.models import models

GOLDEN = {
    "bag-of-words": 5_000_500,
    "cnn": 1_206_590,
    "lstm": 4_050_748,
    "perceptron": 2_410,
    "resnet18": 11_227_812,
    "small-resnet": 183_004,
}


def test_models_are_found_by_their_files():
    assert set(GOLDEN) == set(models())


@pytest.mark.parametrize("name", sorted(models()))
def test_parameter_counts(name):
    model = models()[name]
    shapes = eqx.filter_eval_shape(model.init, jax.random.key(0))
    arrays = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    assert sum(leaf.size for leaf in jax.tree.leaves(arrays)) == model.parameters
    assert model.parameters == GOLDEN[name]
