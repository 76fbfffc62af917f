"""Metrics of models that give an example any number of tags (layout of `models.bag_of_words`)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.types import Examples

HIGHEST = 5
"""Tags that are looked at by recall_at_5."""


def called(params: Any, batch: Examples) -> Float[Array, "b t"]:
    """The logits of a model that is a function of a bag of words."""
    return params(batch["ids"], batch["weights"])


def tagger(logits: Callable[[Any, Any], Any] = called) -> Metric:
    """Of batches with "y": (b, tags), 1 for the tags an example has; `logits(params, batch)`.

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

    return Metric(measure, _values, _overall)


def _values(sums: Mapping[str, float]) -> dict[str, float]:
    right, given, true = sums["right"], sums["given"], sums["true"]
    without = 0.0 if sums["examples"] else math.nan
    return {
        "loss": ratio(sums["loss"], sums["examples"]),
        "precision": ratio(right, given, without),
        "recall": ratio(right, true),
        "recall_at_5": ratio(sums["among_highest"], true),
        "micro_f1": ratio(2 * right, given + true, without),
    }


def _overall(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
    right, either = (
        np.asarray(a, np.float64) for a in (vectors["right"], vectors["given"] + vectors["true"])
    )
    f1 = np.divide(2 * right, either, out=np.zeros_like(right), where=either > 0)
    return {"macro_f1": float(f1.mean())}
