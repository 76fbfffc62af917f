"""A client's K-FAC factors: of each layer by hand, whatever the batches, and pooled by adding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpa.experiments.models import cnn, perceptron, resnet
from fedpa.experiments.models.convolution import convolve
from fedpa.objectives import (
    Objective,
    client_data,
    convolution_input,
    layer_input,
    layer_output,
    least_squares,
    table_input,
)
from fedpa.objectives.layer_inputs import image_patches, observe, output_gradients, stack_layer
from fedpa.precisions import Diagonal, KroneckerPair, Layered, Scalar, layer_precision
from tests.compiling import QUICK
from tests.refusals import refused

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def precision(loss, theta, examples, capacity=None, **options):
    data = client_data(examples, capacity)

    def run(theta, data):
        return layer_precision(Objective(loss), theta, data, KEY, **options)

    return jax.jit(run, compiler_options=QUICK)(theta, data)


def close(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())


THETA = {
    "b1": normal(4),
    "k": normal(2, 2, 1, 3),
    "scale": normal(3),
    "w1": normal(12, 4),
    "w2": normal(4, 2),
}
EXAMPLES = {"x": normal(11, 3, 3, 1), "y": normal(11, 2)}


def network(theta, batch, key):
    """A convolution, a parameter in no layer, and two dense layers."""
    x = convolution_input(batch["x"], theta["k"])
    h = layer_output(convolve(x, theta["k"]), theta["k"]) * theta["scale"].reshape(1, 1, 1, -1)
    h = layer_input(jnp.tanh(h).reshape(len(h), -1), theta["w1"], theta["b1"])
    h = jnp.tanh(layer_output(h @ theta["w1"] + theta["b1"][None], theta["w1"]))
    z = layer_output(layer_input(h, theta["w2"]) @ theta["w2"], theta["w2"])
    return 0.5 * jnp.sum((z - batch["y"]) ** 2, axis=1)


def by_hand(theta, x, y):
    """(a, g) of every row of each layer, and the gradients by "scale", of one example."""
    patches = np.asarray(image_patches(jnp.asarray(x[None]), 2, 1))[0].reshape(4, 4)
    kernel = theta["k"].reshape(4, 3)
    s = patches @ kernel
    c = np.tanh(s * theta["scale"])
    h = np.concatenate([[1.0], c.ravel()])
    t = np.tanh(h @ np.concatenate([theta["b1"][None], theta["w1"]]))
    g2 = t @ theta["w2"] - y
    g1 = (theta["w2"] @ g2) * (1 - t**2)
    inner = (theta["w1"] @ g1).reshape(4, 3) * (1 - c**2)
    layers = [(patches, inner * theta["scale"]), (h[None], g1[None]), (t[None], g2[None])]
    return layers, (inner * s).sum(axis=0)


def wanted_factors(x, y):
    examples = [by_hand(THETA, *both) for both in zip(x, y, strict=True)]
    factors = []
    for rows in zip(*(layers for layers, _ in examples), strict=True):
        a, g = (np.concatenate(part) for part in zip(*rows, strict=True))
        factors.append((a.T @ a, g.T @ g, len(a)))
    return factors, sum(gradient**2 for _, gradient in examples)


@pytest.mark.parametrize(("batch_size", "capacity"), [(3, 11), (32, 11), (4, 16)])
def test_factors_are_those_by_hand_whatever_the_batches(batch_size, capacity):
    found = precision(network, THETA, EXAMPLES, capacity, batch_size=batch_size)
    factors, squares = wanted_factors(EXAMPLES["x"], EXAMPLES["y"])
    assert [layer.weights for layer in found.layers] == [(1,), (3,), (4,)]
    for pair, (inputs, outputs, n) in zip(found.factors, factors, strict=True):
        close(pair, KroneckerPair(inputs[None], outputs[None], n, np.zeros(())))
    close(found.rest, (Diagonal(squares),))


@pytest.mark.long
def test_clients_add_up_to_the_pooled_examples():
    """A and G are summed apart with their counts: unequal clients, and one without examples."""
    parts = [(0, 2), (2, 2), (2, 11)]
    clients = [
        precision(network, THETA, {k: v[a:b] for k, v in EXAMPLES.items()}, capacity=16)
        for a, b in parts
    ]
    total = clients[0].add(clients[1]).add(clients[2])
    pooled = precision(network, THETA, EXAMPLES, capacity=16)
    close(total, pooled)
    v = jax.tree.map(jnp.asarray, THETA)
    close(total.add_identity(0.5).solve(v), pooled.add_identity(0.5).solve(v))


def test_one_example_of_one_layer_is_its_fisher_matrix():
    """aaᵀ ⊗ ggᵀ is exact for n = 1; the quadratic's gradient is x(xᵀθ − y)."""
    x, y, theta = normal(1, 3), normal(1), normal(3)
    found = precision(least_squares.loss, theta, {"x": x, "y": y})
    gradient = x[0] * (x[0] @ theta - y[0])
    for v in np.eye(3, dtype=np.float32):
        close(found.times(jnp.asarray(v)), gradient * (gradient @ v))


def test_large_layers_have_blocks_of_the_input_factor():
    whole, cut = (precision(network, THETA, EXAMPLES, block=block) for block in (100, 5))
    inputs = whole.factors[1].inputs[0]  # 13 rows of [b; W]: blocks of 5, 5 and 3
    for place, block in enumerate(cut.factors[1].inputs):
        rows = slice(5 * place, min(5 * place + 5, 13))
        size = rows.stop - rows.start
        close(block[:size, :size], inputs[rows, rows])
        assert not block[size:].any()
    close(cut.factors[1].outputs, whole.factors[1].outputs)


def test_a_table_has_a_diagonal_and_its_outputs():
    theta = {"rows": normal(5, 2)}
    examples = {"ids": np.array([[0, 3], [3, 3], [4, 0]], np.int32)}

    def loss(theta, batch, key):
        ids = table_input(batch["ids"], theta["rows"])
        return 0.5 * jnp.sum(layer_output(theta["rows"][ids], theta["rows"]) ** 2, axis=(1, 2))

    (pair,) = precision(loss, theta, examples).factors
    np.testing.assert_array_equal(pair.inputs[:, 0, 0], [2, 0, 0, 3, 1])
    g = theta["rows"][examples["ids"].ravel()]
    close(pair.outputs, (g.T @ g)[None])
    assert pair.n == 6


def picture_loss(params, batch, key):
    logits = params(batch["x"])
    return -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]]


MODELS = {
    "perceptron": (lambda: perceptron.init(KEY), perceptron.loss, normal(3, 64), 2),
    "cnn": (lambda: cnn.CNN(5, key=KEY), cnn.loss, normal(3, 28, 28, 1), 4),
    "resnet": (
        lambda: resnet.ResNet(3, (4,), (2,), 2, 5, pool=False, key=KEY),
        picture_loss,
        RNG.integers(0, 256, (3, 32, 32, 3), np.uint8),
        5,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_tasks_show_what_leaves_their_layers(name):
    """Of what enters and what leaves a layer, Σ a gᵀ is the gradient by [b; W]."""
    make, loss, x, count = MODELS[name]
    batch = {"x": jnp.asarray(x), "y": jnp.array([0, 1, 4])}
    params, static = eqx.partition(make(), eqx.is_inexact_array)

    def whole(params, batch, key):
        return loss(eqx.combine(params, static), batch, key)

    def products(params, batch):
        seen = observe(whole, params, batch, jnp.ones(3), KEY)
        left = output_gradients(whole, params, batch, jnp.ones(3), KEY)
        gradient = jax.grad(lambda p: jnp.sum(whole(p, batch, KEY)))(params)
        return [
            (rows.x.T @ left[layer.weights[0]], stack_layer(layer, gradient))
            for layer, rows in seen.items()
        ]

    found = jax.jit(products, compiler_options=QUICK)(params, batch)
    assert len(found) == count
    for product, gradient in found:
        np.testing.assert_allclose(product, gradient, rtol=0, atol=1e-4 * np.abs(gradient).max())


def no_loss(show):
    def loss(theta, batch, key):
        x = layer_input(batch["x"], theta)
        return jnp.sum(show(x @ theta, theta), axis=1)

    return loss


@pytest.mark.parametrize(
    ("show", "words"),
    [
        (lambda z, w: layer_output(z, 2 * w), "that is no parameter"),
        (lambda z, w: layer_output(z[:, :1], w), "(32, 1)"),
        (lambda z, w: layer_output(z.T, w).T, "(2, 32)"),
    ],
)
def test_outputs_that_are_none_are_refused(show, words):
    with refused(words):
        precision(no_loss(show), normal(3, 2), {"x": normal(5, 3)})


def test_outputs_of_fewer_rows_than_a_table_reads_are_refused():
    def loss(theta, batch, key):
        ids = table_input(batch["ids"], theta)
        return jnp.sum(layer_output(theta[ids[:, 0]], theta), axis=1)

    with refused("(32, 2)"):
        precision(loss, normal(3, 2), {"ids": np.zeros((5, 2), np.int32)})


@pytest.mark.parametrize("kind", ["dense", "table"])
def test_rows_that_are_padding_count_in_neither_factor(kind):
    """Also where the loss depends on them."""
    theta, ids = normal(3, 2), np.array([[0, 1], [2, 2], [1, 0]], np.int32)
    real = np.array([[True, False], [True, True], [False, False]])

    def loss(theta, batch, key):
        if kind == "table":
            z = theta[table_input(batch["ids"], theta, real=batch["real"])]
        else:
            z = layer_input(jnp.eye(3)[batch["ids"]], theta, real=batch["real"]) @ theta
        return 0.5 * jnp.sum(layer_output(z, theta) ** 2, axis=(1, 2))

    (pair,) = precision(loss, theta, {"ids": ids, "real": real}, capacity=4).factors
    a, g = np.eye(3)[ids[real]], theta[ids[real]]
    found = pair.inputs[:, 0, 0] if kind == "table" else np.diag(pair.inputs[0])
    np.testing.assert_array_equal(found, (a**2).sum(axis=0))
    close(pair.outputs, (g.T @ g)[None])
    assert pair.n == 3


def test_parameters_of_another_structure_are_refused():
    prior = Layered((), (), (Scalar(jnp.float32(1)),))
    with refused("v has 2"):
        prior.times({"a": jnp.ones(1), "b": jnp.ones(1)})
