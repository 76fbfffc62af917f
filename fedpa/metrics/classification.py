"""Metrics of classifiers: mean loss and accuracy over a data set."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


def classification(
    logits: Callable[[Any, jax.Array], jax.Array], x: Any, y: Any
) -> Callable[[Any], dict[str, float]]:
    """params → {"loss", "accuracy"} on (x, y); `logits(params, x)` has a row per example."""
    x, y = jnp.asarray(x), jnp.asarray(y)

    @eqx.filter_jit
    def measure(params: Any) -> tuple[jax.Array, jax.Array]:
        scores = logits(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()
        return loss, jnp.mean((jnp.argmax(scores, axis=-1) == y).astype(jnp.float32))

    def evaluate(params: Any) -> dict[str, float]:
        loss, accuracy = measure(params)
        return {"loss": float(loss), "accuracy": float(accuracy)}

    return evaluate
