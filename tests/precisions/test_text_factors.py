"""K-FAC factors of recurrences, embeddings and bags of words, in float64.

Row by row with `jax.grad`, pooled by adding, and nothing of padding.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedpa
from fedpa.experiments.models import bag_of_words, lstm
from fedpa.objectives import Objective, client_data
from fedpa.precisions import KroneckerPair, kronecker, layer_precision
from tests.compiling import QUICK

KEY = jax.random.key(0)
EXAMPLES, STEPS, WORDS = 5, 4, 7
RNG = np.random.default_rng(0)


class Case(NamedTuple):
    loss: Any
    theta: Any
    examples: Any
    run: Any
    """(θ, shifts of the outputs of an example's rows, example) → ℓ, and each layer's inputs."""
    outputs: tuple[int, ...]
    """Of each layer, as many as it has."""
    tables: tuple[bool, ...]
    padded: Any = None
    """The examples with more padding."""


def normal(*shape):
    return RNG.standard_normal(shape)


def with_one(x):
    return jnp.concatenate([jnp.ones(1), x])


def sentences(ragged):
    words = RNG.integers(1, WORDS, (EXAMPLES, STEPS + 1)).astype(np.int32)
    if ragged:
        for row, length in zip(words, (4, 2, 5, 1, 3), strict=True):  # one of them without targets
            row[length:] = 0
    return {"x": words[:, :-1], "y": words[:, 1:]}


def cross_entropy(z, label):
    return jax.nn.logsumexp(z) - z[label]


def run_lstm(model, shifts, example):
    """One sentence, step by step as long as there are targets."""
    length = int((example["y"] != 0).sum())
    h, c = jnp.zeros((2, len(model.recurrent_weight)))
    losses, rows = [], [[], [], [], []]
    for t in range(length):
        embedded, recurrent, hidden, output = (shift[t] for shift in shifts)
        x = model.embedding[example["x"][t]] + embedded
        inputs = [jnp.eye(len(model.embedding))[example["x"][t]], with_one(jnp.append(x, h))]
        z = x @ model.input_weight + h @ model.recurrent_weight + model.bias + recurrent
        i, f, g, o = jnp.split(z, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        top = h @ model.hidden_weight + model.hidden_bias + hidden
        inputs += [with_one(h), with_one(top)]
        z = top @ model.output_weight + model.output_bias + output
        losses.append(cross_entropy(z, example["y"][t]) / length)
        for all_rows, row in zip(rows, inputs, strict=True):
            all_rows.append(row)
    return sum(losses), rows


def run_bag(model, shifts, example):
    bag = example["weights"] @ jnp.eye(len(model.weight))[example["ids"]]
    z = bag @ model.weight + model.bias + shifts[0][0]
    return jnp.mean(jax.nn.softplus(z) - z * example["y"].astype(float)), [[with_one(bag)]]


def run_rnn(theta, shifts, example):
    h, losses, rows = jnp.zeros(len(theta["u"])), [], [[], [], []]
    for t in range(STEPS):
        x = theta["words"][example["x"][t]] + shifts[0][t]
        rows[0].append(jnp.eye(WORDS)[example["x"][t]])
        rows[1].append(with_one(jnp.append(x, h)))
        h = jnp.tanh(x @ theta["w"] + h @ theta["u"] + theta["b"] + shifts[1][t])
        rows[2].append(h)
        losses.append(cross_entropy(h @ theta["v"] + shifts[2][t], example["y"][t]))
    return sum(losses) / STEPS, rows


def documented():
    """The recurrence of docs/global_precision.md, a scan."""
    text = (Path(fedpa.__file__).parents[1] / "docs" / "global_precision.md").read_text()
    found: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), found)

    def loss(theta, batch, key):
        with jax.numpy_rank_promotion("allow"):
            return found["next_word"](theta, batch, key)

    return loss


def unrolled(theta, batch, key):
    """The same as a loop over the steps, each of which shows what enters and leaves its layers."""
    h, losses = jnp.zeros((len(batch["x"]), len(theta["u"]))), 0
    for t in range(STEPS):
        ids = fedpa.table_input(batch["x"][:, t], theta["words"])
        x = fedpa.layer_output(theta["words"][ids], theta["words"])
        x, h = fedpa.layer_input((x, h), (theta["w"], theta["u"]), theta["b"])
        z = fedpa.layer_output(x @ theta["w"] + h @ theta["u"] + theta["b"][None], theta["w"])
        h = fedpa.layer_input(jnp.tanh(z), theta["v"])
        z = fedpa.layer_output(h @ theta["v"], theta["v"])
        losses += optax.softmax_cross_entropy_with_integer_labels(z, batch["y"][:, t])
    return losses / STEPS


def of_shapes(make):
    leaves, structure = jax.tree.flatten(jax.eval_shape(make))
    return jax.tree.unflatten(structure, [normal(*leaf.shape) for leaf in leaves])


def next_word():
    examples = sentences(ragged=True)
    return Case(
        lstm.loss,
        of_shapes(lambda: lstm.NextWordLSTM(WORDS - lstm.SPECIAL_IDS, 3, 2, key=KEY)),
        examples,
        run_lstm,
        outputs=(3, 8, 3, WORDS),
        tables=(True, False, False, False),
        padded={name: np.pad(array, ((0, 0), (0, 3))) for name, array in examples.items()},
    )


def tags():
    """Words that are there twice, and padding."""
    ids = np.array([[1, 3, 1], [5, 0, 0], [2, 2, 2], [4, 5, 0], [0, 1, 2]], np.int32)
    shares = np.array([[3, 3, 3], [9, 0, 0], [3, 3, 3], [4, 5, 0], [1, 2, 6]]) / 9
    examples = {"ids": ids, "weights": shares, "y": RNG.integers(0, 2, (EXAMPLES, 4))}
    pad = ((0, 0), (0, 2))
    return Case(
        bag_of_words.loss,
        of_shapes(lambda: bag_of_words.BagOfWords(6, 4, key=KEY)),
        examples,
        run_bag,
        outputs=(4,),
        tables=(True,),
        padded={**examples, "ids": np.pad(ids, pad), "weights": np.pad(shares, pad)},
    )


def own_recurrence(loss):
    theta = {
        "words": normal(WORDS, 3),
        "w": normal(3, 2),
        "u": normal(2, 2),
        "b": normal(2),
        "v": normal(2, WORDS),
    }
    outputs, tables = (3, 2, WORDS), (True, False, False)
    return Case(loss, theta, sentences(ragged=False), run_rnn, outputs, tables)


CASES = {
    "lstm": next_word(),
    "bag of words": tags(),
    "own scan": own_recurrence(documented()),
    "own loop": own_recurrence(unrolled),
}


def precision(case, examples, capacity=None, **options):
    def run(theta, data):
        return layer_precision(Objective(case.loss), theta, data, KEY, **options)

    data = client_data(examples, capacity)
    return jax.jit(run, compiler_options=QUICK)(case.theta, data)


def cut_blocks(matrix, largest):
    """The diagonal blocks, the last filled up with zeros."""
    count, size = kronecker.cut(len(matrix), largest)
    whole = np.zeros((count * size,) * 2)
    whole[: len(matrix), : len(matrix)] = matrix
    return np.stack([whole[i : i + size, i : i + size] for i in range(0, count * size, size)])


def by_rows(case, block):
    """Each layer's pair, from inputs and gradients row by row, an example at a time."""
    theta = jax.tree.map(jnp.asarray, case.theta)
    inputs, gradients = ([[] for _ in case.outputs] for _ in range(2))
    zeros = [jnp.zeros((STEPS, outputs)) for outputs in case.outputs]
    for j in range(EXAMPLES):
        example = jax.tree.map(lambda x, j=j: x[j], case.examples)

        def of_shifts(shifts, example=example):
            return case.run(theta, shifts, example)

        if not jax.tree.leaves(jax.eval_shape(of_shifts, zeros)[1]):
            continue  # no targets: no rows
        by_layer, rows = jax.jit(jax.grad(of_shifts, has_aux=True), compiler_options=QUICK)(zeros)
        for layer, (a, g) in enumerate(zip(rows, by_layer, strict=True)):
            inputs[layer] += a
            gradients[layer] += list(g[: len(a)])
            assert not g[len(a) :].any()
    pairs = []
    for a, g, table in zip(inputs, gradients, case.tables, strict=True):
        a, g = np.stack(a), np.stack(g)
        sums = cut_blocks(a.T @ a, 1 if table else block)
        pairs.append(KroneckerPair(sums, cut_blocks(g.T @ g, block), len(a), 0))
    return tuple(pairs)


def close(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.long] * (name in ("lstm", "own scan")))
        for name, case in CASES.items()
    ],
)


@every_case
@pytest.mark.parametrize(
    ("block", "batch_size", "capacity"),
    [pytest.param(100, 32, 5, marks=pytest.mark.long), (3, 2, 8)],
)
def test_factors_are_those_of_the_rows(case, block, batch_size, capacity):
    """Whole and in blocks, the last not full; in one batch and in several with padded examples."""
    with jax.enable_x64(True):
        found = precision(case, case.examples, capacity, block=block, batch_size=batch_size)
        close(found.factors, by_rows(case, block))
        assert found.rest == ()
        v = jax.tree.map(jnp.asarray, case.theta)
        damped = found.add_identity(0.5)
        close(damped.solve(damped.times(v)), case.theta)


@every_case
@pytest.mark.long
def test_clients_add_up_to_the_pooled_examples(case):
    with jax.enable_x64(True):
        parts = [
            precision(case, jax.tree.map(lambda x, a=a, b=b: x[a:b], case.examples), 6, block=3)
            for a, b in ((0, 1), (1, 1), (1, EXAMPLES))
        ]
        pooled = precision(case, case.examples, 6, block=3)
        close(parts[0].add(parts[1]).add(parts[2]), pooled)


@pytest.mark.parametrize("name", ["lstm", "bag of words"])
def test_padding_adds_nothing(name):
    case = CASES[name]
    with jax.enable_x64(True):
        close(precision(case, case.padded), precision(case, case.examples))
