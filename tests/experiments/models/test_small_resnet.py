"""The small ResNet: its function written plainly, and that it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.experiments.models.convolution import by_xla
from fedpa.experiments.models.resnet import (
    loss,
    prepare_pictures,
    regularizer,
    small_resnet,
)
from fedpa.objectives.checks import check_loss
from fedpa.objectives.objective import Objective
from tests.compiling import QUICK
from tests.experiments.models.test_resnet18 import (
    BATCH,
    assert_same,
    drawn,
    logits_and_gradient,
    norm,
)

KEY = jax.random.key(0)
TINY = drawn(lambda key: small_resnet(classes=5, width=4, groups=2, key=key))


def plain(p, x):
    h = jax.nn.relu(norm(p.stem_norm, by_xla(x, p.stem, 2, "SAME")))
    for block, stride, pixels in zip(p.blocks, (1, 2, 2), (12, 6, 3), strict=True):
        y = h if stride == 1 else jax.nn.relu(norm(block.first_norm, h))
        y = by_xla(y, block.first_kernel, stride, "SAME")
        y = by_xla(jax.nn.relu(norm(block.second_norm, y)), block.second_kernel, 1, "SAME")
        if stride == 2:
            h = norm(block.projection.norm, by_xla(h, block.projection.kernel, 2))
        h = h + y
        assert h.shape[1:3] == (pixels, pixels)
    h = jnp.mean(jax.nn.relu(norm(p.final_norm, h)), axis=(1, 2))
    return h @ p.weight + p.bias.reshape(1, -1)


@pytest.mark.long
def test_logits_and_gradient_are_those_of_the_plain_network():
    fast = logits_and_gradient(lambda p: p(BATCH["x"], KEY), TINY)
    assert_same(
        fast, logits_and_gradient(lambda p: plain(p, prepare_pictures(BATCH["x"], KEY)), TINY)
    )


def test_losses_are_per_example_and_of_random_crops_with_a_key():
    @functools.partial(jax.jit, compiler_options=QUICK)
    def all_of_them(p):
        return loss(p, BATCH, None), p(BATCH["x"]), loss(p, BATCH, KEY)

    sure, logits, random = (np.asarray(a, np.float64) for a in all_of_them(TINY))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(sure, -log_p[np.arange(3), BATCH["y"]], rtol=1e-4)
    assert not np.any(sure == random)


def test_is_an_objective():
    check_loss(Objective(loss, regularizer), TINY, BATCH)


@pytest.mark.long
def test_learns_which_way_stripes_go():
    """From augmented bytes, in eighty steps of SGD; of eight seeds none needed more than sixty."""
    rng = np.random.default_rng(1)
    y = jnp.asarray(rng.integers(0, 2, 64), jnp.int32)
    lines = rng.integers(0, 256, (64, 32, 1, 3))
    x = np.where(np.asarray(y).reshape(-1, 1, 1, 1) == 1, lines, lines.swapaxes(1, 2))
    batch = {"x": jnp.asarray(np.broadcast_to(x, (64, 32, 32, 3)), jnp.uint8), "y": y}

    def objective(p, key):
        return jnp.mean(loss(p, batch, key)) + regularizer(p)

    @jax.jit
    def accuracy_after_training(p, key):
        def step(p, key):
            gradient = jax.grad(objective)(p, key)
            return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), None

        p, _ = jax.lax.scan(step, p, jax.random.split(key, 80))
        return jnp.mean((jnp.argmax(p(batch["x"]), 1) == y).astype(jnp.float32))

    model = jax.jit(lambda key: small_resnet(2, 8, 2, key=key), compiler_options=QUICK)(KEY)
    assert float(accuracy_after_training(model, KEY)) > 0.95
