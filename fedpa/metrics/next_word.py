"""Metrics of models of the next word (ids as in `fedpa.experiments.models.lstm`)."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from fedpa.data.text import PAD
from fedpa.metrics.classification import cross_entropy
from fedpa.metrics.metric import Counts, Metric, ratio
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
        # Time first, as recurrent models make them: no second copy of all logits is needed.
        scores = logits(params, batch["x"]).swapaxes(0, 1)
        rows, targets = scores.reshape(-1, scores.shape[-1]), y.T.reshape(-1)
        losses, right = (
            a.reshape(y.T.shape).T for a in (cross_entropy(rows, targets), _highest(rows, targets))
        )
        target, word = y != PAD, (y > PAD) & (y <= vocabulary)
        return Counts(
            {
                "targets": _number(target),
                "loss": jnp.sum(jnp.where(target, losses, 0), axis=1),
                "words": _number(word),
                "right": _number(word & right),
            }
        )

    return Metric(measure, _values)


def _highest(rows: Float[Array, "n v"], targets: Int[Array, " n"]) -> Bool[Array, " n"]:
    """Whether argmax(row) is the target, for each row.

    Said as comparisons: on CPUs argmax takes a quarter of an evaluation's time, they a twentieth.
    Of NaN they are false, and no guess is right then.
    """
    chosen = jnp.take_along_axis(rows, targets[:, None], axis=1)
    own, ids = targets[:, None], jax.lax.broadcasted_iota(targets.dtype, rows.shape, 1)
    below = jnp.where(ids < own, rows < chosen, (rows <= chosen) | (ids == own))
    return jnp.all(below, axis=1)


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
