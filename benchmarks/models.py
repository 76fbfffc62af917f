"""Our side's models: `fedpa.experiments.models`, from a work's initial parameters and arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import optax

from fedpa.experiments.models import bag_of_words, lstm
from fedpa.experiments.models import cnn as convolutional

Arrays = dict[str, np.ndarray]


class Ours(NamedTuple):
    loss: Callable[[Any, Any, Any], jax.Array]
    params: Any
    examples: Callable[[np.ndarray, np.ndarray], Any] = lambda x, y: {"x": x, "y": y}
    """(x, y) of a client → the arrays its loss reads."""
    sparse: Any = None


def logistic(start: Arrays) -> Ours:
    def loss(params: Any, batch: Any, _: Any) -> jax.Array:
        logits = batch["x"] @ params["w"] + params["b"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    return Ours(loss, start)


def cnn(start: Arrays) -> Ours:
    """Without dropout, which every system would draw differently."""
    model = _filled(
        lambda key: convolutional.CNN(key=key),
        [
            "conv1.w",
            "conv2.w",
            "conv1.b",
            "conv2.b",
            "dense1.w",
            "dense2.w",
            "dense1.b",
            "dense2.b",
        ],
        start,
    )
    return Ours(lambda params, batch, _: convolutional.loss(params, batch, None), model)


def next_word(start: Arrays) -> Ours:
    names = ["embedding", "lstm.wx", "lstm.wh", "lstm.b"]
    names += [f"dense{layer}.{part}" for layer in (1, 2) for part in "wb"]
    model = _filled(lambda key: lstm.NextWordLSTM(key=key), names, start)
    return Ours(lstm.loss, model, sparse=lstm.SPARSE)


def bow(start: Arrays) -> Ours:
    model = _filled(lambda key: bag_of_words.BagOfWords(key=key), ["w", "b"], start)

    def examples(x: np.ndarray, y: np.ndarray) -> Any:
        return {"ids": x, "weights": np.full(x.shape, 1 / x.shape[1], np.float32), "y": y}

    return Ours(bag_of_words.loss, model, examples, bag_of_words.SPARSE)


def _filled(init: Callable[[Any], Any], names: list[str], start: Arrays) -> Any:
    """The model with the work's numbers in its leaves, in this order."""
    shapes = eqx.filter_eval_shape(init, jax.random.key(0))
    leaves, structure = jax.tree.flatten(shapes)
    assert [leaf.shape for leaf in leaves] == [start[name].shape for name in names]
    return jax.tree.unflatten(structure, [start[name] for name in names])


MODELS = {"logistic": logistic, "cnn": cnn, "lstm": next_word, "bow": bow}
