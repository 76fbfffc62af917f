"""ResNet-18: its function written plainly, its size, its penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa import FedpaError
from fedpa.experiments.models.convolution import by_xla
from fedpa.experiments.models.resnet import loss, prepare_pictures, regularizer, resnet18
from fedpa.objectives.checks import check_loss
from fedpa.objectives.objective import Objective
from tests.compiling import QUICK

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
BATCH = {
    "x": jnp.asarray(RNG.integers(0, 256, (3, 32, 32, 3)), jnp.uint8),
    "y": jnp.asarray([1, 0, 4], jnp.int32),
}


def drawn(init):
    """A model of that shape with all of its numbers drawn: nothing is compiled to make it."""
    shapes = jax.eval_shape(init, KEY)
    return jax.tree.map(
        lambda leaf: jnp.asarray((0.3 * RNG.standard_normal(leaf.shape)).astype(leaf.dtype)), shapes
    )


TINY = drawn(lambda key: resnet18(classes=5, width=4, groups=2, key=key))


def norm(p, x):
    n, h, w, c = x.shape
    grouped = x.reshape(n, h * w, p.groups, c // p.groups)
    mean = jnp.mean(grouped, axis=(1, 3), keepdims=True)
    normal = (grouped - mean) / jnp.sqrt(jnp.var(grouped, axis=(1, 3), keepdims=True) + 1e-3)
    return normal.reshape(x.shape) * p.scale.reshape(1, 1, 1, c) + p.offset.reshape(1, 1, 1, c)


def plain(p, x):
    """The network as the original writes it, on what it sees of pictures."""
    h = jax.nn.relu(norm(p.stem_norm, by_xla(x, p.stem, 2, "SAME")))
    h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for i, block in enumerate(p.blocks):
        y = by_xla(
            h if i == 0 else jax.nn.relu(norm(block.first_norm, h)), block.first_kernel, 1, "SAME"
        )
        y = by_xla(jax.nn.relu(norm(block.second_norm, y)), block.second_kernel, 1, "SAME")
        if i in (2, 4, 6):
            h = norm(block.projection.norm, by_xla(h, block.projection.kernel))
        h = h + y
    assert h.shape[1:3] == (6, 6)
    h = jnp.mean(jax.nn.relu(norm(p.final_norm, h)), axis=(1, 2))
    return h @ p.weight + p.bias.reshape(1, -1)


def logits_and_gradient(function, model):
    def both(p):
        logits, pull = jax.vjp(function, p)
        return logits, pull(jnp.sin(logits))[0]

    return jax.jit(both, compiler_options=QUICK)(model)


def assert_same(fast, slow):
    for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


def test_logits_are_those_of_the_plain_network():
    """Gradients are the small ResNet's test, which has the same blocks, and the long test's."""
    fast = jax.jit(lambda p: p(BATCH["x"]), compiler_options=QUICK)(TINY)
    slow = jax.jit(lambda p: plain(p, prepare_pictures(BATCH["x"], None)), compiler_options=QUICK)(
        TINY
    )
    assert_same(fast, slow)


@pytest.mark.long
def test_gradient_is_that_of_the_plain_network():
    fast = logits_and_gradient(lambda p: p(BATCH["x"]), TINY)
    assert_same(
        fast, logits_and_gradient(lambda p: plain(p, prepare_pictures(BATCH["x"], None)), TINY)
    )


@pytest.mark.parametrize("groups", [2, 32])
def test_groups_are_an_option(groups):
    shapes = jax.eval_shape(lambda: resnet18(groups=groups, key=KEY))
    assert {b.second_norm.groups for b in shapes.blocks} == {groups}
    logits = jax.eval_shape(lambda p: p(BATCH["x"]), shapes)
    assert (logits.shape, logits.dtype) == ((3, 100), jnp.float32)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 11_227_812


@pytest.mark.parametrize("groups", [0, 48])
def test_groups_that_do_not_divide_the_channels_are_refused(groups):
    with pytest.raises(FedpaError, match=rf"groups = {groups}: must divide .* 64"):
        resnet18(groups=groups, key=KEY)


def test_begins_as_the_original():
    model = jax.eval_shape(lambda: resnet18(key=KEY))
    assert model.blocks[0].first_norm is None
    assert [b.projection is not None for b in model.blocks] == [i in (2, 4, 6) for i in range(8)]
    assert all(b.stride == 1 for b in model.blocks)

    def two_of_its_arrays(key):
        model = resnet18(width=32, key=key)
        return model.blocks[-1].second_kernel, model.weight

    draws = jax.jit(two_of_its_arrays, compiler_options=QUICK)(KEY)
    kernel, weight = (np.asarray(draw, np.float64) for draw in draws)
    assert kernel.std() == pytest.approx(np.sqrt(2 / (9 * 256)), rel=0.01)
    # He's normal is cut at two standard deviations and widened to make up for it.
    assert np.abs(kernel).max() < 2.3 * kernel.std()
    assert weight.std() == pytest.approx(0.01, rel=0.02)


def test_the_penalty_is_of_kernels_and_the_last_layer():
    model = TINY
    kernels = [model.stem, model.weight, model.bias]
    for block in model.blocks:
        kernels += [block.first_kernel, block.second_kernel]
        kernels += [block.projection.kernel] if block.projection else []
    assert len(kernels) == 3 + 16 + 3
    expected = 1e-4 * sum(np.sum(np.asarray(w, np.float64) ** 2) for w in kernels)
    assert float(regularizer(model)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_an_objective(dtype):
    model = jax.tree.map(lambda w: w.astype(dtype), TINY)
    check_loss(Objective(loss, regularizer), model, BATCH)
