"""Metrics of classifiers: mean loss and accuracy."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedpa.metrics.metric import Counts, Metric
from fedpa.types import Examples


def classifier(logits: Callable[[Any, jax.Array], jax.Array]) -> Metric:
    """Loss and accuracy of batches {"x", "y"}; `logits(params, x)` has a row per example."""

    def measure(params: Any, batch: Examples) -> Counts:
        scores, labels = logits(params, batch["x"]), batch["y"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        right = (jnp.argmax(scores, axis=-1) == labels).astype(jnp.float32)
        return Counts({"loss": losses, "right": right, "examples": jnp.ones_like(right)})

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        n = sums["examples"]
        return {
            "loss": sums["loss"] / n if n else float("nan"),
            "accuracy": sums["right"] / n if n else float("nan"),
        }

    return Metric(measure, values)
