"""Softmax cross-entropy over many classes: −log softmax(z)_y.

The gradient softmax(z) − 1[y] is written as one expression of the logits, one pass over them: that
of `z[y]` would otherwise be scattered into zeros as large as the logits and added.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpa.precision import widened

Logits = Float[Array, "n v"]
Targets = Int[Array, " n"]
Losses = Float[Array, " n"]


@jax.custom_vjp
def cross_entropy(logits: Logits, targets: Targets) -> Losses:
    """One loss per row of logits, in at least float32."""
    return _forward(logits, targets)[0]


def _forward(logits: Logits, targets: Targets) -> tuple[Losses, tuple[Logits, Targets, Losses]]:
    wide = widened(logits)
    highest = jnp.max(wide, axis=1)
    total = jnp.log(jnp.sum(jnp.exp(wide - highest[:, None]), axis=1)) + highest
    chosen = jnp.take_along_axis(wide, targets[:, None], axis=1)[:, 0]
    return total - chosen, (logits, targets, total)


def _backward(saved: tuple[Logits, Targets, Losses], d: Losses) -> tuple[Logits, None]:
    logits, targets, total = saved
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 1)
    probabilities = jnp.exp(widened(logits) - total[:, None])
    right = (classes == targets[:, None]).astype(probabilities.dtype)
    return ((probabilities - right) * d[:, None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
