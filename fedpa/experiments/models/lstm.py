"""StackOverflow's next word: embedding 96, LSTM 670, dense 96, dense over the words (appendix D).

Ids are 0 for padding, 1 … V for words, V + 1 for a word out of vocabulary, V + 2 and V + 3 for a
sentence's begin and end. A batch is {"x": (b, t), "y": (b, t)}: at every place the word there and
the word that follows. Padding stands at the end, so that no real target follows it: what the model
makes of it is in no loss. Initial values are those of Keras, in which the originals were written.

The recurrence is written so that products over single time steps are only where it needs them:

    z_t = x_t W + h_{t−1} U + b            i, f, o = σ(z_i), σ(z_f), σ(z_o);   g = tanh(z_g)
    c_t = f c_{t−1} + i g                  h_t = o tanh(c_t)                   h_0 = c_0 = 0

The input's share x W + b is one product over all steps. Differentiating the scan as it stands would
add up the gradients of W, U and b step by step, a pass over all weights each; here the backward
scan yields ∂z_t alone, and with all of them ∂U = Σ_t h_{t−1}ᵀ ∂z_t is one product (∂W, ∂b and ∂x,
too). ∂z_t is also the derivative by the input's share, which is therefore shown as the layer's
output. Reverse mode only: forward mode (and with it `jax.hessian`) is not defined.
"""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedpa.data.text import PAD
from fedpa.metrics.classification import cross_entropy
from fedpa.objectives.layer_inputs import layer_input, layer_output, observing, table_input
from fedpa.objectives.objective import SparseTable, gather_rows, replace_table
from fedpa.types import Examples, Key, Losses

SPECIAL_IDS = 4
"""Padding, out of vocabulary, begin and end of a sentence."""


class NextWordLSTM(eqx.Module):
    embedding: Float[Array, "v e"]
    input_weight: Float[Array, "e 4*h"]
    recurrent_weight: Float[Array, "h 4*h"]
    bias: Float[Array, " 4*h"]
    hidden_weight: Float[Array, "h e"]
    hidden_bias: Float[Array, " e"]
    output_weight: Float[Array, "e v"]
    output_bias: Float[Array, " v"]

    def __init__(
        self, vocabulary: int = 10_000, embedding: int = 96, hidden: int = 670, *, key: Key
    ) -> None:
        ids = vocabulary + SPECIAL_IDS
        keys = jax.random.split(key, 5)
        glorot, zeros = jax.nn.initializers.glorot_uniform(), jnp.zeros
        self.embedding = jax.random.uniform(keys[0], (ids, embedding), minval=-0.05, maxval=0.05)
        self.input_weight = glorot(keys[1], (embedding, 4 * hidden))
        self.recurrent_weight = jax.nn.initializers.orthogonal()(keys[2], (hidden, 4 * hidden))
        # The forget gate begins open.
        self.bias = zeros(4 * hidden).at[hidden : 2 * hidden].set(1)
        self.hidden_weight, self.hidden_bias = (
            glorot(keys[3], (hidden, embedding)),
            zeros(embedding),
        )
        self.output_weight, self.output_bias = glorot(keys[4], (embedding, ids)), zeros(ids)

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t v"]:
        """The logits of every place's next word."""
        logits = self.logits(self.embedding[tokens.T])
        return logits.reshape(*tokens.T.shape, -1).swapaxes(0, 1)

    def logits(
        self, words: Float[Array, "t b e"], real: Bool[Array, "b t"] | None = None
    ) -> Float[Array, "t*b v"]:
        """The logits from embedded words; time first, as the recurrence runs.

        real: where there is a target, for methods that look at what enters the layers.
        """
        sentences = words.shape[1]
        z = input_share(words, self.input_weight, self.bias)
        h = lstm(_show_output(z, self.input_weight, sentences), self.recurrent_weight)
        hidden = dense(h.reshape(-1, h.shape[-1]), self.hidden_weight, self.hidden_bias)
        hidden = _show_output(hidden, self.hidden_weight, sentences)
        if observing():
            self._show_inputs(words, h, hidden.reshape(*h.shape[:2], -1), real)
        z = dense(hidden, self.output_weight, self.output_bias)
        return _show_output(z, self.output_weight, sentences)

    def _show_inputs(
        self,
        words: Float[Array, "t b e"],
        h: Float[Array, "t b h"],
        hidden: Float[Array, "t b e"],
        real: Bool[Array, "b t"] | None,
    ) -> None:
        """What enters the layers: [x_t, h_{t−1}], h_t and the hidden layer, by sentences."""
        words, earlier, h, hidden = (a.swapaxes(0, 1) for a in (words, before(h), h, hidden))
        weights = (self.input_weight, self.recurrent_weight)
        layer_input((words, earlier), weights, self.bias, real=real)
        layer_input(h, self.hidden_weight, self.hidden_bias, real=real)
        layer_input(hidden, self.output_weight, self.output_bias, real=real)


def outputs(params: NextWordLSTM, batch: Examples) -> Float[Array, "b t v"]:
    """The logits of every place's next word, the layers shown."""
    z = params.logits(_gather(params, batch).embedding, batch["y"] != PAD)
    return z.reshape(*batch["x"].T.shape, -1).swapaxes(0, 1)


def loss(params: NextWordLSTM, batch: Examples, key: Key) -> Losses:
    """Per sentence, the mean cross-entropy of its targets; 0 if it has none."""
    return _loss_of_gathered(_gather(params, batch), batch, key)


def _gather(params: NextWordLSTM, batch: Examples) -> NextWordLSTM:
    """The model with the words' rows in the embedding's place, which is shown."""
    gathered: NextWordLSTM = gather_rows(SPARSE, params, batch)
    if observing():
        ids = table_input(batch["x"], params.embedding, real=batch["y"] != PAD)
        words = _show_output(gathered.embedding, params.embedding, len(ids))
        gathered = replace_table(SPARSE, gathered, words)
    return gathered


def _loss_of_gathered(params: NextWordLSTM, batch: Examples, key: Key) -> Losses:
    """The same with the words' rows in the embedding's place."""
    del key
    targets, mask = batch["y"].T, batch["y"] != PAD
    losses = cross_entropy(params.logits(params.embedding, mask), targets.reshape(-1))
    losses = jnp.where(mask, losses.reshape(targets.shape).T, 0)
    return jnp.sum(losses, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1).astype(losses.dtype)


def _show_output(
    z: Float[Array, "*tb o"], weight: Float[Array, "_ o"], sentences: int
) -> Float[Array, "*tb o"]:
    """`layer_output` of what is time first, (t, b, o) or (t·b, o): it is shown by sentences."""
    if not observing():
        return z
    rows = z.reshape(-1, sentences, z.shape[-1]).swapaxes(0, 1)
    return layer_output(rows, weight).swapaxes(0, 1).reshape(z.shape)


def count_targets(batch: Examples) -> Losses:
    """Count the words of each sentence that are to be predicted."""
    return jnp.sum((batch["y"] != PAD).astype(jnp.float32), axis=1)


def dense(
    x: Float[Array, "n i"], weight: Float[Array, "i o"], bias: Float[Array, " o"]
) -> Float[Array, "n o"]:
    """X W + b, the bias as one more row of the weight: [x, 1] [W; b].

    The bias's gradient is then a row of the weight's, from one product. XLA would sum the outputs'
    gradient over the batch in a pass of its own: for 10,000 outputs slower than copying W.
    """
    ones = jnp.ones((x.shape[0], 1), x.dtype)
    return jnp.concatenate([x, ones], axis=1) @ jnp.concatenate([weight, bias[None]])


SPARSE = SparseTable(
    table=lambda params: params.embedding,
    rows=lambda batch: batch["x"].T,
    loss=_loss_of_gathered,
)


@jax.custom_vjp
def input_share(
    x: Float[Array, "t b i"], weight: Float[Array, "i g"], bias: Float[Array, " g"]
) -> Float[Array, "t b g"]:
    """X W + b of all steps. Left to JAX, ∂W would be made as its transpose, and transposed."""
    return _share_forward(x, weight, bias)[0]


def _share_forward(
    x: Float[Array, "t b i"], weight: Float[Array, "i g"], bias: Float[Array, " g"]
) -> tuple[Float[Array, "t b g"], tuple[Array, Array]]:
    return x @ weight + bias[None, None], (x, weight)


def _share_backward(saved: tuple[Array, Array], dz: Array) -> tuple[Array, Array, Array]:
    x, weight = saved
    return (
        jnp.einsum("tbg,ig->tbi", dz, weight),
        jnp.einsum("tbi,tbg->ig", x, dz),
        jnp.sum(dz, axis=(0, 1)),
    )


input_share.defvjp(_share_forward, _share_backward)


Sequence = Float[Array, "t b h"]


class Gates(NamedTuple):
    """i, f, g and o, the activations that one step, or all steps, made."""

    input: Float[Array, "*t b h"]
    forget: Float[Array, "*t b h"]
    cell: Float[Array, "*t b h"]
    output: Float[Array, "*t b h"]


class Residuals(NamedTuple):
    recurrent_weight: Float[Array, "h g"]
    h: Sequence
    c: Sequence
    gates: Gates


@jax.custom_vjp
def lstm(z: Float[Array, "t b g"], recurrent_weight: Float[Array, "h g"]) -> Sequence:
    """h_1 … h_T from the input's share x W + b of z, time first.

    The last axis of z, and of the weight, is the four gates' in turn: i, f, g, o. The derivative
    by the input's share is the derivative by z itself.
    """
    return _forward(z, recurrent_weight)[0]


def _forward(
    z: Float[Array, "t b g"], recurrent_weight: Float[Array, "h g"]
) -> tuple[Sequence, Residuals]:
    def step(
        carry: tuple[Array, Array], z: Array
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Gates]]:
        h, c = carry
        i, f, g, o = jnp.split(z + h @ recurrent_weight, 4, axis=-1)
        gates = Gates(jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o))
        c = gates.forget * c + gates.input * gates.cell
        h = gates.output * jnp.tanh(c)
        return (h, c), (h, c, gates)

    start = jnp.zeros((z.shape[1], recurrent_weight.shape[0]), z.dtype)
    _, (h, c, gates) = jax.lax.scan(step, (start, start), z)
    return h, Residuals(recurrent_weight, h, c, gates)


def _backward(saved: Residuals, dh: Sequence) -> tuple[Array, Array]:
    def step(
        carry: tuple[Array, Array], now: tuple[Array, Array, Array, Gates]
    ) -> tuple[tuple[Array, Array], Array]:
        dh_next, dc = carry
        dh, c, c_before, (i, f, g, o) = now
        dh = dh + dh_next
        tanh_c = jnp.tanh(c)
        dc = dc + dh * o * (1 - tanh_c**2)
        di, df = dc * g * i * (1 - i), dc * c_before * f * (1 - f)
        dg, do = dc * i * (1 - g**2), dh * tanh_c * o * (1 - o)
        dz = jnp.concatenate([di, df, dg, do], axis=-1)
        return (_times_transposed(dz, saved.recurrent_weight), dc * f), dz

    inputs = (dh, saved.c, before(saved.c), saved.gates)
    start = jnp.zeros_like(dh[0])
    _, dz = jax.lax.scan(step, (start, start), inputs, reverse=True)
    return dz, jnp.einsum("tbh,tbg->hg", before(saved.h), dz)


lstm.defvjp(_forward, _backward)


def before(a: Sequence) -> Sequence:
    """a_{t−1} in place of a_t; 0 at the first step."""
    return jnp.concatenate([jnp.zeros_like(a[:1]), a[:-1]])


def _times_transposed(dz: Float[Array, "b g"], weight: Float[Array, "h g"]) -> Float[Array, "b h"]:
    """dz Uᵀ, as (U dzᵀ)ᵀ.

    Left alone, XLA folds the transpositions into the product and reads U across its rows, half as
    fast again on CPUs. The barriers make it transpose the two small matrices instead.
    """
    transposed: Array = jax.lax.optimization_barrier(dz.T)
    product: Array = jax.lax.optimization_barrier(weight @ transposed)
    return product.T
