"""The losses of a next-word model's targets, written plainly."""

import jax
import jax.numpy as jnp

from fedpa.data.text import PAD


def token_losses(params, batch):
    """The cross-entropy of every target, 0 where it is padding; and where there is a target."""
    log_p = jax.nn.log_softmax(params(batch["x"]))
    losses = -jnp.take_along_axis(log_p, batch["y"][..., None], axis=2)[..., 0]
    mask = batch["y"] != PAD
    return jnp.where(mask, losses, 0), mask
