"""What enters a layer: of every kind, under padding, and at no cost while nobody looks."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.special import expit

import fedpa
from fedpa import FedpaError
from fedpa.experiments.models import bag_of_words, cnn, lstm, perceptron, resnet
from fedpa.experiments.models.convolution import by_xla, convolve
from fedpa.experiments.models.resnet import GroupNorm
from fedpa.objectives import layer_input, over_examples, per_example, table_input
from fedpa.objectives.layer_inputs import (
    convolution_input,
    data_layers,
    layers_of,
    observe,
    observing,
    output_gradients,
    stack_layer,
    unstack_layer,
)
from tests.compiling import QUICK

KEY = jax.random.key(0)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def seen(loss, theta, examples, weights=None):
    weights = np.ones(len(jax.tree.leaves(examples)[0])) if weights is None else weights
    layers = []

    def look(theta, examples, weights):
        found = observe(loss, theta, examples, weights, KEY)
        layers.extend(found)
        return list(found.values())

    run = jax.jit(look, compiler_options=QUICK)
    found = run(theta, examples, np.asarray(weights, np.float32))
    return dict(zip(layers, jax.device_get(found), strict=True))


def matrix(layer, theta):
    return np.asarray(jax.jit(lambda theta: stack_layer(layer, theta))(theta))


def random(make):
    """A model with random numbers in all places."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(make))
    return jax.tree.unflatten(structure, [normal(i, *x.shape) for i, x in enumerate(leaves)])


def only(found):
    ((layer, inputs),) = found.items()
    return layer, inputs


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(*spec) for name, spec in arrays.items()}


IMAGES = shapes(x=((2, 28, 28, 1), jnp.float32), y=((2,), jnp.int32))
PICTURES = shapes(x=((2, 32, 32, 3), jnp.uint8), y=((2,), jnp.int32))
SENTENCES = shapes(x=((2, 5), jnp.int32), y=((2, 5), jnp.int32))
BAGS = shapes(ids=((2, 4), jnp.int32), weights=((2, 4), jnp.float32), y=((2, 3), jnp.uint8))
MODELS = {
    "cnn": (cnn.loss, lambda: cnn.CNN(4, key=KEY), IMAGES),
    "small-resnet": (resnet.loss, lambda: resnet.small_resnet(5, 4, 2, key=KEY), PICTURES),
    "resnet18": (resnet.loss, lambda: resnet.resnet18(5, 4, 2, key=KEY), PICTURES),
    "lstm": (lstm.loss, lambda: lstm.NextWordLSTM(7, 3, 4, key=KEY), SENTENCES),
    "bag-of-words": (bag_of_words.loss, lambda: bag_of_words.BagOfWords(9, 3, key=KEY), BAGS),
    "digits": (
        perceptron.loss,
        lambda: eqx.filter(perceptron.init(KEY), eqx.is_array),
        shapes(x=((2, 64), jnp.float32), y=((2,), jnp.int32)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_benchmark_model_shows_all_its_layers(name):
    loss, make, examples = MODELS[name]
    theta = jax.eval_shape(make)
    layers = layers_of(loss, theta, examples)
    leaves = [w for layer in layers for w in (*layer.weights, layer.bias) if w is not None]
    is_norm = lambda part: isinstance(part, GroupNorm)  # noqa: E731
    norms = sum(map(is_norm, jax.tree.leaves(theta, is_leaf=is_norm)))
    assert len(leaves) == len(set(leaves)) == len(jax.tree.leaves(theta)) - 2 * norms
    for layer in layers:
        size = sum(jax.tree.leaves(theta)[w].size for w in layer.weights)
        bias = 0 if layer.bias is None else layer.outputs
        assert layer.features * layer.outputs == size + bias


@pytest.mark.parametrize("name", MODELS)
def test_the_first_layer_s_inputs_are_the_data_and_no_other_s(name):
    """Of the LSTM that is the embedding, which is shown first."""
    loss, make, examples = MODELS[name]
    first, *deeper = data_layers(loss, jax.eval_shape(make), examples)
    assert first
    assert not any(deeper)


@pytest.mark.parametrize("name", MODELS)
def test_every_benchmark_model_shows_what_leaves_its_layers(name):
    loss, make, examples = MODELS[name]
    theta, key = jax.eval_shape(make), jax.eval_shape(lambda: KEY)

    def both(theta, examples, key):
        entered = observe(loss, theta, examples, jnp.ones(2), key)
        left = output_gradients(loss, theta, examples, jnp.ones(2), key)
        layers.extend(entered)
        return [inputs.real for inputs in entered.values()], left

    layers = []
    rows, left = jax.eval_shape(both, theta, examples, key)
    shapes = [(*real.shape, layer.outputs) for layer, real in zip(layers, rows, strict=True)]
    assert [left.pop(layer.weights[0]).shape for layer in layers] == shapes
    assert not left


@pytest.mark.parametrize("name", MODELS)
def test_unobserved_a_model_is_traced_as_if_it_showed_nothing(name, monkeypatch):
    loss, make, examples = MODELS[name]
    theta, key = jax.eval_shape(make), jax.eval_shape(lambda: KEY)

    def traced():
        return str(jax.make_jaxpr(lambda *a: loss(*a))(theta, examples, key).jaxpr)

    showing = traced()
    for module in (cnn, resnet, lstm, bag_of_words, perceptron):
        for function in ("layer_input", "layer_output", "convolution_input", "table_input"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, lambda x, *rest, **options: x)
    monkeypatch.setattr(perceptron, "over_examples", jax.vmap)
    monkeypatch.setattr(lstm, "_show_output", lambda z, *rest: z)
    assert showing == traced()
    assert not observing()


def test_rows_times_the_stacked_weights_are_the_layers_output():
    """[1, x] [b; W] = xW + b, for weights stored either way; and there and back again."""
    theta = {"w": normal(0, 4, 3), "b": normal(1, 3), "v": normal(2, 5, 3), "c": normal(3, 5)}
    x = normal(4, 6, 2, 4)

    def loss(theta, batch, key):
        h = layer_input(batch, theta["w"], theta["b"]) @ theta["w"] + theta["b"][None, None]
        y = layer_input(h, theta["v"], theta["c"], out_first=True) @ theta["v"].T
        return jnp.sum(y + theta["c"][None, None], axis=(1, 2))

    (first, one), (second, two) = seen(loss, theta, x).items()
    h = (x @ theta["w"] + theta["b"]).reshape(-1, 3)
    np.testing.assert_allclose(one.x @ matrix(first, theta), h, rtol=1e-5, atol=1e-6)
    y = h @ theta["v"].T + theta["c"]
    np.testing.assert_allclose(two.x @ matrix(second, theta), y, rtol=1e-5, atol=1e-5)
    doubled = jax.jit(lambda theta: unstack_layer(second, 2 * stack_layer(second, theta), theta))(
        theta
    )
    for name, factor in {"w": 1, "b": 1, "v": 2, "c": 2}.items():
        np.testing.assert_array_equal(doubled[name], factor * theta[name])


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("stride", "channels"), [(1, 1), (2, 3)])
def test_a_convolutions_inputs_are_its_patches(stride, channels, padding):
    theta = {"kernel": normal(0, 3, 3, channels, 4), "bias": normal(1, 4)}
    x = normal(2, 2, 7, 6, channels)

    def loss(theta, batch, key):
        shown = convolution_input(batch, theta["kernel"], theta["bias"], stride, padding)
        return jnp.sum(convolve(shown, theta["kernel"], stride, padding), axis=(1, 2, 3))

    layer, rows = only(seen(loss, theta, x))
    out, theirs = jax.jit(_convolved, static_argnums=(2, 3), compiler_options=QUICK)(
        x, theta["kernel"], stride, padding
    )
    found = rows.x @ matrix(layer, theta)
    np.testing.assert_allclose(found - theta["bias"], out.reshape(-1, 4), rtol=1e-4, atol=1e-5)
    # And the Gram matrix against JAX's own patches, whose channels come first.
    theirs = np.asarray(theirs).reshape(-1, channels, 9).swapaxes(1, 2).reshape(-1, 9 * channels)
    gram = rows.x[:, 1:].T @ rows.x[:, 1:]
    np.testing.assert_allclose(gram, theirs.T @ theirs, rtol=1e-4, atol=1e-4)


def _convolved(x, kernel, stride, padding):
    """XLA's convolution, and the patches it is of."""
    strides, layout = (stride, stride), ("NHWC", "HWIO", "NHWC")
    return by_xla(x, kernel, stride, padding), jax.lax.conv_general_dilated_patches(
        x, (3, 3), strides, padding, dimension_numbers=layout
    )


def test_a_recurrences_inputs_are_its_words_and_its_states_before_them():
    model = random(lambda: lstm.NextWordLSTM(7, 3, 4, key=KEY))
    batch = {"x": np.array([[1, 2, 3], [4, 5, 0]]), "y": np.array([[2, 3, 0], [5, 0, 0]])}
    found = seen(lstm.loss, model, batch)
    table, recurrence, hidden, output = found
    assert (table.table, recurrence.features, hidden.features, output.features) == (True, 8, 5, 4)
    # By hand, sentence by sentence, only where there is a target.
    rows, states = [], []
    for words, targets in zip(batch["x"].tolist(), batch["y"].tolist(), strict=True):
        h = c = np.zeros(4)
        for word, target in zip(words, targets, strict=True):
            x = model.embedding[word]
            if target:
                rows.append(np.concatenate([[1], x, h]))
            z = x @ model.input_weight + h @ model.recurrent_weight + model.bias
            i, f, g, o = np.split(z, 4)
            c = expit(f) * c + expit(i) * np.tanh(g)
            h = expit(o) * np.tanh(c)
            if target:
                states.append(h)
    x, real = found[recurrence]
    assert float(real.sum()) == 3
    np.testing.assert_allclose(x[real > 0], np.stack(rows), rtol=1e-5, atol=1e-6)
    assert not x[real == 0].any()
    x, real = found[hidden]
    np.testing.assert_allclose(x[real > 0][:, 1:], np.stack(states), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[table].sums, np.isin(np.arange(11), [1, 2, 4]))
    assert float(found[table].real.sum()) == 3


def test_of_a_bag_of_words_the_squares_are_kept():
    """One of its words is there twice: its shares add up before they are squared."""
    model = random(lambda: bag_of_words.BagOfWords(6, 2, key=KEY))
    ids = np.array([[1, 3, 1], [5, 0, 0], [2, 2, 2]])
    shares = np.array([[0.5, 0.25, 0.25], [1, 0, 0], [1, 1, 1]], np.float32)
    batch = {"ids": ids, "weights": shares, "y": np.zeros((3, 2), np.uint8)}
    layer, found = only(seen(bag_of_words.loss, model, batch, [1, 1, 0]))
    bags = np.einsum("bw,bwv->bv", shares, np.eye(6)[ids])[:2]
    x = np.concatenate([np.ones((2, 1)), bags], axis=1)
    np.testing.assert_allclose(found.sums, np.diagonal(x.T @ x), rtol=1e-6)
    assert float(found.real.sum()) == 2
    assert layer.features == 7


def test_padded_examples_and_places_do_not_count():
    theta = normal(0, 3)
    x = normal(1, 4, 2, 3)
    x[3] = np.inf
    real = np.array([[True, True], [True, False], [False, False], [True, True]])

    def loss(theta, batch, key):
        return jnp.sum(layer_input(batch, theta, real=real) @ theta, axis=1)

    layer, rows = only(seen(loss, theta, x, [1, 1, 1, 0]))
    assert layer.outputs == 1
    np.testing.assert_array_equal(rows.real, [1, 1, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(rows.x[:3], x.reshape(-1, 3)[:3])
    assert not rows.x[3:].any()


@pytest.mark.parametrize("way", ["over_examples", "per_example"])
def test_layers_are_seen_in_functions_of_one_example(way):
    theta = random(lambda: eqx.nn.Linear(4, 3, key=KEY))
    batch = {"x": normal(1, 5, 4), "y": np.arange(5) % 3}

    def one(layer, x, y):
        z = layer(layer_input(x, layer.weight, layer.bias, out_first=True))
        return optax.softmax_cross_entropy_with_integer_labels(z, y)

    if way == "over_examples":
        loss = lambda theta, batch, key: over_examples(lambda x, y: one(theta, x, y))(  # noqa: E731
            batch["x"], batch["y"]
        )
    else:

        def whole(theta, batch, key):
            h = layer_input(batch["x"], theta.weight, theta.bias, out_first=True)
            z = h @ theta.weight.T + theta.bias[None]
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z, batch["y"]))

        loss = per_example(whole)
    layer, rows = only(seen(loss, theta, batch, [1, 1, 0, 1, 1]))
    assert (layer.inputs, layer.outputs) == ((4,), 3)
    np.testing.assert_array_equal(rows.x[rows.real > 0][:, 1:], batch["x"][[0, 1, 3, 4]])
    jax.eval_shape(loss, theta, batch, KEY)  # and nothing has leaked


def test_a_layer_that_runs_twice_has_the_inputs_of_both():
    theta = {"w": normal(0, 2, 2), "same": normal(0, 2, 2)}  # told apart by place, not by value

    def loss(theta, batch, key):
        h = layer_input(batch, theta["w"]) @ theta["w"]
        return jnp.sum(layer_input(h, theta["w"]) @ theta["w"], axis=1)

    x = normal(1, 3, 2)
    layer, rows = only(seen(loss, theta, x))
    np.testing.assert_allclose(rows.x, np.concatenate([x, x @ theta["w"]]), rtol=1e-5)
    assert layer.weights == (1,)


@pytest.mark.parametrize(
    ("show", "words"),
    [
        (lambda theta, x: x, "shows no layer: call fedpa.layer_input"),
        (lambda theta, x: layer_input(x, 2 * theta["w"]), "that is no parameter"),
        (lambda theta, x: layer_input(x, theta["w"], out_first=True), "out_first=False"),
        (lambda theta, x: layer_input(x, theta["w"].T, out_first=True), "that is no parameter"),
        (lambda theta, x: layer_input(x.T, theta["w"]), "first axis must be the examples"),
        (lambda theta, x: layer_input(x, theta["w"], theta["long"]), r"\[3, 5\] outputs as one"),
        (
            lambda theta, x: layer_input(layer_input(x, theta["w"]), theta["w"], theta["b"]),
            "two different layers",
        ),
        (
            lambda theta, x: jax.vmap(lambda row: layer_input(row, theta["w"]))(x),
            "fedpa.over_examples in place of jax.vmap",
        ),
        (lambda theta, x: jax.jit(lambda w: layer_input(x, w) @ w)(theta["w"]), "outside of"),
        (lambda theta, x: table_input(x, 2 * theta["w"]), "that is no parameter"),
    ],
)
def test_what_can_not_be_a_layer_is_refused(show, words):
    theta = {"w": normal(0, 4, 3), "b": normal(1, 3), "long": normal(2, 5)}

    def loss(theta, batch, key):
        show(theta, batch)
        return jnp.sum(batch @ theta["w"], axis=1)

    with pytest.raises(FedpaError, match=words):
        layers_of(loss, theta, jax.ShapeDtypeStruct((2, 4), jnp.float32))


def test_the_documented_lines_are_all_that_a_model_needs():
    """The code of docs/global_precision.md."""
    text = (Path(fedpa.__file__).parents[1] / "docs" / "global_precision.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    found = {}
    exec(code, found)
    theta = {"w1": normal(0, 4, 3), "b1": normal(1, 3), "w2": normal(2, 3, 2), "b2": normal(3, 2)}
    batch = shapes(x=((2, 4), jnp.float32), y=((2,), jnp.int32))
    with jax.numpy_rank_promotion("allow"):
        layers = layers_of(found["loss"], theta, batch)
    assert [(layer.features, layer.outputs) for layer in layers] == [(5, 3), (4, 2)]
    for name in re.findall(r"fedpa\.(\w+_(?:in|out)put|over_examples)\b", text):
        assert name in fedpa.__all__
