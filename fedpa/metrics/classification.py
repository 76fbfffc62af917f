"""Metrics of classifiers: of one label, of the next word at every place, of any number of tags."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpa.data.text import PAD
from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.precision import widen
from fedpa.types import Examples, Model

Rows = Float[Array, "n v"]
Targets = Int[Array, " n"]
Losses = Float[Array, " n"]
HIGHEST = 5
"""Tags that recall_at_5 looks at."""


def classifier(logits: Callable[[Model, Array], Array]) -> Metric:
    """Measure a classifier's `loss` and `accuracy`.

    The loss is the mean of −log softmax(z)_y over examples, accuracy the share with argmax z = y.

    Args:
        logits: `logits(params, x)`: z, a row per example.
    Returns:
        The metric of batches {"x": inputs, "y": labels from 0}.
    Example:
        >>> metric = classifier(lambda params, x: x @ params)
        >>> batch = {"x": jnp.eye(2), "y": jnp.array([0, 0])}
        >>> counts = metric.measure(jnp.eye(2), batch)
        >>> metric.values({name: float(v.sum()) for name, v in counts.each.items()})["accuracy"]
        0.5
    """

    def measure(params: Any, batch: Examples) -> Counts:
        scores, y = logits(params, batch["x"]), batch["y"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, y)
        right = (jnp.argmax(scores, axis=-1) == y).astype(jnp.float32)
        return Counts({"examples": jnp.ones_like(right), "loss": losses, "right": right})

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "loss": ratio(sums["loss"], sums["examples"]),
            "accuracy": ratio(sums["right"], sums["examples"]),
        }

    return Metric(measure, values)


def next_words(
    vocabulary: int, logits: Callable[[Model, Array], Array] = lambda params, x: params(x)
) -> Metric:
    """Measure a language model's `loss`, `perplexity` and `accuracy` of the next word.

    The loss is the mean cross-entropy of all targets that are not padding (ends and unknown words
    are among them), perplexity its exponential. Accuracy is that of targets that are one of the
    `vocabulary` words: padding, unknown words, begin and end are left out. A guess is the highest
    of all ids, so that to guess "unknown" is wrong; of equally high ones it is the lowest.

    Args:
        vocabulary: Vocabulary size: words have the ids 1 to this, 0 is padding.
        logits: `logits(params, x)`, (b, t, ids).
    Returns:
        The metric of batches {"x": (b, t), "y": (b, t)} of word ids.
    Example:
        >>> metric = next_words(3, lambda table, x: table[x])  # the next word by this one
        >>> batch = {"x": jnp.array([[1, 2, 3]]), "y": jnp.array([[2, 3, 0]])}
        >>> counts = metric.measure(jnp.eye(5)[jnp.array([0, 2, 1, 0, 0])], batch)
        >>> counts.each["right"].tolist(), counts.each["words"].tolist()
        ([1.0], [2.0])
    """

    def count(mask: Array) -> Array:
        return jnp.sum(mask.astype(jnp.float32), axis=1)

    def measure(params: Any, batch: Examples) -> Counts:
        y = batch["y"]
        # Time first, as recurrent models make them: no second copy of all logits is needed.
        scores = logits(params, batch["x"]).swapaxes(0, 1)
        rows, targets = scores.reshape(-1, scores.shape[-1]), y.T.reshape(-1)
        losses, right = (
            a.reshape(y.T.shape).T
            for a in (cross_entropy(rows, targets), _is_highest(rows, targets))
        )
        target, word = y != PAD, (y > PAD) & (y <= vocabulary)
        return Counts(
            {
                "targets": count(target),
                "loss": jnp.sum(jnp.where(target, losses, 0), axis=1),
                "words": count(word),
                "right": count(word & right),
            }
        )

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        loss = ratio(sums["loss"], sums["targets"])
        with np.errstate(over="ignore"):  # a diverged model's is infinite
            perplexity = float(np.exp(np.float64(loss)))
        accuracy = ratio(sums["right"], sums["words"])
        return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}

    return Metric(measure, values)


def _is_highest(rows: Rows, targets: Targets) -> Bool[Array, " n"]:
    """Whether argmax(row) is the target, for each row.

    Said as comparisons: on CPUs argmax takes a quarter of an evaluation's time, they a twentieth.
    Of NaN they are false, and no guess is right then.
    """
    chosen = jnp.take_along_axis(rows, targets[:, None], axis=1)
    own, ids = targets[:, None], jax.lax.broadcasted_iota(targets.dtype, rows.shape, 1)
    below = jnp.where(ids < own, rows < chosen, (rows <= chosen) | (ids == own))
    return jnp.all(below, axis=1)


def tagger(
    logits: Callable[[Model, Examples], Array] = lambda params, batch: params(
        batch["ids"], batch["weights"]
    ),
) -> Metric:
    """Measure a classifier of tags, of which an example has any number.

    - `loss`: the mean over tags and examples of the sigmoid cross-entropy.
    - `precision`, `recall`, `micro_f1`: of all pairs of example and tag together. A tag is given
      where its probability is above 1/2 (a logit above 0).
    - `recall_at_5`: of all true tags, the share that is among its example's five highest; of
      equally high tags the one of the lower id is higher.
    - `macro_f1`: the mean of all tags' F1, for all clients together.

    Where no tag is given, precision is 0, and F1 is 0 where there are no true tags either
    (scikit-learn's zero_division=0): a model that dares nothing gets no better numbers for it. A
    recall without true tags has nothing to divide by, and is NaN; so is everything without
    examples.

    Args:
        logits: `logits(params, batch)`, (b, tags).
    Returns:
        The metric of batches with "y": (b, tags), 1 for the tags an example has.
    Example:
        >>> metric = tagger(lambda params, batch: batch["x"] @ params)
        >>> batch = {"x": jnp.array([[1.0, -1.0]]), "y": jnp.array([[1, 1]])}
        >>> counts = metric.measure(jnp.eye(2), batch)
        >>> metric.values({name: float(v.sum()) for name, v in counts.each.items()})["recall"]
        0.5
    """

    def measure(params: Any, batch: Examples) -> Counts:
        z = logits(params, batch)
        y = batch["y"].astype(z.dtype)
        losses = jnp.mean(jax.nn.softplus(z) - z * y, axis=1)
        true, given = y > 0, z > 0
        _, highest = jax.lax.top_k(z, min(HIGHEST, z.shape[1]))
        by_tag = {"true": true, "given": given, "right": true & given}
        vectors = {name: mask.astype(jnp.float32) for name, mask in by_tag.items()}
        sums = {name: jnp.sum(mask, axis=1) for name, mask in vectors.items()}
        among = jnp.sum(jnp.take_along_axis(vectors["true"], highest, axis=1), axis=1)
        return Counts(
            {"examples": jnp.ones_like(among), "loss": losses, "among_highest": among, **sums},
            vectors,
        )

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        right, given, true = sums["right"], sums["given"], sums["true"]
        without = 0.0 if sums["examples"] else math.nan
        return {
            "loss": ratio(sums["loss"], sums["examples"]),
            "precision": ratio(right, given, without),
            "recall": ratio(right, true),
            "recall_at_5": ratio(sums["among_highest"], true),
            "micro_f1": ratio(2 * right, given + true, without),
        }

    def overall(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
        right, either = vectors["right"], vectors["given"] + vectors["true"]
        f1 = np.divide(2 * right, either, out=np.zeros_like(right), where=either > 0)
        return {"macro_f1": float(f1.mean())}

    return Metric(measure, values, overall)


@jax.custom_vjp
def cross_entropy(logits: Rows, targets: Targets) -> Losses:
    """Softmax cross-entropy −log softmax(z)_y of each row of logits, in at least float32.

    The gradient softmax(z) − 1[y] is one expression of the logits, one pass over them: that of
    `z[y]` would otherwise be scattered into zeros as large as the logits and added.

    Args:
        logits: z, a row per example.
        targets: y, from 0.
    Returns:
        The losses, one per row.
    Example:
        >>> cross_entropy(jnp.zeros((1, 2)), jnp.array([0])).tolist()  # log 2
        [0.6931471824645996]
    """
    return _forward(logits, targets)[0]


def _forward(logits: Rows, targets: Targets) -> tuple[Losses, tuple[Rows, Targets, Losses]]:
    wide = widen(logits)
    highest = jnp.max(wide, axis=1)
    total = jnp.log(jnp.sum(jnp.exp(wide - highest[:, None]), axis=1)) + highest
    chosen = jnp.take_along_axis(wide, targets[:, None], axis=1)[:, 0]
    return total - chosen, (logits, targets, total)


def _backward(saved: tuple[Rows, Targets, Losses], d: Losses) -> tuple[Rows, None]:
    logits, targets, total = saved
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    probabilities = jnp.exp(widen(logits) - total[:, None])
    right = (classes == targets[:, None]).astype(probabilities.dtype)
    return ((probabilities - right) * d[:, None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
