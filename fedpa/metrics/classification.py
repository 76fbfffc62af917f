"""Metrics of classifiers: mean loss and accuracy."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.types import Examples

Logits = Callable[[Any, jax.Array], jax.Array]
"""`logits(params, x)`: a row per example."""


def classifier(logits: Logits) -> Metric:
    """`loss` and `accuracy` of batches {"x", "y"}; y holds labels."""

    def measure(params: Any, batch: Examples) -> Counts:
        losses, right = _losses_and_right(logits(params, batch["x"]), batch["y"])
        return Counts({"examples": jnp.ones_like(right), "loss": losses, "right": right})

    return Metric(measure, _values)


def _losses_and_right(scores: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, y)
    return losses, (jnp.argmax(scores, axis=-1) == y).astype(jnp.float32)


def _values(sums: Mapping[str, float]) -> dict[str, float]:
    return {
        "loss": ratio(sums["loss"], sums["examples"]),
        "accuracy": ratio(sums["right"], sums["examples"]),
    }
