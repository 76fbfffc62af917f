"""Metrics of models of the next word (ids as in `fedpa.models.lstm`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.models.kernels.cross_entropy import cross_entropy
from fedpa.models.lstm import PAD
from fedpa.types import Examples


def called(params: Any, x: Int[Array, "b t"]) -> Float[Array, "b t v"]:
    """The logits of a model that is a function of words."""
    return params(x)


def next_words(vocabulary: int, logits: Callable[[Any, Any], Any] = called) -> Metric:
    """`loss`, `perplexity` and `accuracy` of batches {"x": (b, t), "y": (b, t)}.

    The loss is the mean cross-entropy of all targets that are not padding (ends and unknown words
    are among them), perplexity its exponential. Accuracy is that of targets that are one of the
    `vocabulary` words: padding, unknown words, begin and end are left out. A guess is the highest
    of all ids, so that to guess "unknown" is wrong; of equally high ones it is the lowest.
    """

    def measure(params: Any, batch: Examples) -> Counts:
        y = batch["y"]
        scores = logits(params, batch["x"])
        rows = scores.reshape(-1, scores.shape[-1])
        losses = cross_entropy(rows, y.reshape(-1)).reshape(y.shape)
        guesses = jnp.argmax(rows, axis=-1).reshape(y.shape).astype(y.dtype)
        target, word = y != PAD, (y > PAD) & (y <= vocabulary)
        return Counts(
            {
                "targets": _number(target),
                "loss": jnp.sum(jnp.where(target, losses, 0), axis=1),
                "words": _number(word),
                "right": _number(word & (guesses == y)),
            }
        )

    return Metric(measure, _values)


def _number(mask: Array) -> Array:
    return jnp.sum(mask.astype(jnp.float32), axis=1)


def _values(sums: Mapping[str, float]) -> dict[str, float]:
    loss = ratio(sums["loss"], sums["targets"])
    with np.errstate(over="ignore"):  # a diverged model's is infinite
        perplexity = float(np.exp(np.float64(loss)))
    return {
        "loss": loss,
        "perplexity": perplexity,
        "accuracy": ratio(sums["right"], sums["words"]),
    }
