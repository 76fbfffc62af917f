"""Posteriors of the bundled networks: every structure, from a federation of two clients."""

import jax
import numpy as np
import pytest

from fedpa.data import from_mapping
from fedpa.experiments.models import bag_of_words, cnn, lstm, perceptron, resnet
from fedpa.objectives import Likelihood
from fedpa.posterior import PredictionSettings, evaluate_posterior, measure_curvature
from tests.refusals import refused

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def images(*shape, n=3, classes=4):
    x = RNG.random((n, *shape), np.float32)
    return {"x": x, "y": RNG.integers(0, classes, n).astype(np.int32)}


def sentences(n=3):
    words = RNG.integers(1, 6, (n, 4)).astype(np.int32)
    return {"x": words, "y": np.where(RNG.random((n, 4)) < 0.3, 0, words).astype(np.int32)}


def bags(n=3):
    ids = RNG.integers(0, 6, (n, 3)).astype(np.int32)
    y = (RNG.random((n, 4)) < 0.5).astype(np.float32)
    return {"ids": ids, "weights": np.full((n, 3), 1 / 3, np.float32), "y": y}


NETWORKS = {
    "perceptron": (
        lambda: perceptron.init(KEY, pixels=9, hidden=5, classes=4),
        Likelihood(lambda p, b: perceptron.logits(p, b["x"])),
        lambda: images(9),
    ),
    "lstm": (
        lambda: lstm.NextWordLSTM(3, 3, 4, key=KEY),
        Likelihood(lstm.outputs, ignored=0),
        sentences,
    ),
    "bag-of-words": (
        lambda: bag_of_words.BagOfWords(6, 4, key=KEY),
        Likelihood(bag_of_words.outputs, "sigmoid"),
        bags,
    ),
    "cnn": (
        lambda: cnn.CNN(10, key=KEY),
        Likelihood(lambda p, b: p(b["x"])),
        lambda: images(28, 28, 1),
    ),
    "resnet": (
        lambda: resnet.small_resnet(classes=4, key=KEY),
        Likelihood(lambda p, b: p(b["x"])),
        lambda: images(32, 32, 3),
    ),
}
SHORT = {("perceptron", "diagonal"), ("bag-of-words", "last-layer")}
CASES = [
    pytest.param(name, structure, marks=[pytest.mark.long] * ((name, structure) not in SHORT))
    for name in NETWORKS
    for structure in ("kronecker", "last-layer", "diagonal", "low-rank")
]


@pytest.mark.parametrize(("name", "structure"), CASES)
def test_a_network_has_a_posterior(name, structure):
    make, likelihood, examples = NETWORKS[name]
    clients = from_mapping({"a": examples(), "b": examples()})
    options = {"rank": 2} if structure == "low-rank" else {}
    curvature = measure_curvature(
        make(), likelihood, clients, structure=structure, progress=False, **options
    )
    measure = evaluate_posterior(likelihood, clients, PredictionSettings(draws=3, batch_size=3))
    wide, narrow = (measure(curvature.posterior(x), KEY).values for x in (1.0, 1e8))
    assert np.isfinite(list(wide.values())).all()
    assert narrow["mutual_information"] < 1e-3 < wide["mutual_information"]
    assert np.isfinite(curvature.log_marginal_likelihood(1.0))


def test_a_last_layer_that_is_too_large_is_refused():
    bag = bag_of_words.BagOfWords(3000, 4, key=KEY)
    with refused("structure = 'last-layer'", "12,004"):
        measure_curvature(
            bag, NETWORKS["bag-of-words"][1], {"a": bags()}, structure="last-layer", progress=False
        )
