"""Metrics of classifiers: mean loss and accuracy; cross-entropy over many classes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.precision import widened
from fedpa.types import Examples

Logits = Callable[[Any, jax.Array], jax.Array]
"""`logits(params, x)`: a row per example."""
Rows = Float[Array, "n v"]
Targets = Int[Array, " n"]
Losses = Float[Array, " n"]


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


@jax.custom_vjp
def cross_entropy(logits: Rows, targets: Targets) -> Losses:
    """Softmax cross-entropy −log softmax(z)_y of each row of logits, in at least float32.

    The gradient softmax(z) − 1[y] is one expression of the logits, one pass over them: that of
    `z[y]` would otherwise be scattered into zeros as large as the logits and added.
    """
    return _forward(logits, targets)[0]


def _forward(logits: Rows, targets: Targets) -> tuple[Losses, tuple[Rows, Targets, Losses]]:
    wide = widened(logits)
    highest = jnp.max(wide, axis=1)
    total = jnp.log(jnp.sum(jnp.exp(wide - highest[:, None]), axis=1)) + highest
    chosen = jnp.take_along_axis(wide, targets[:, None], axis=1)[:, 0]
    return total - chosen, (logits, targets, total)


def _backward(saved: tuple[Rows, Targets, Losses], d: Losses) -> tuple[Rows, None]:
    logits, targets, total = saved
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    probabilities = jnp.exp(widened(logits) - total[:, None])
    right = (classes == targets[:, None]).astype(probabilities.dtype)
    return ((probabilities - right) * d[:, None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
