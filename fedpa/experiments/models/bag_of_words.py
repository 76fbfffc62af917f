"""StackOverflow's tags: logistic regressions of 500 tags on a bag of 10,000 words (appendix D).

A batch is {"ids": (b, w), "weights": (b, w), "y": (b, tags)}: an example's words, each with its
share of the bag (the mean of one-hots gives each 1 over the number of words; padding has weight
0), and 1 for the tags it has. The bag's product with the weight is then the weighted sum of w rows,
and no 10,000-wide batch is made.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpa.objectives.layer_inputs import layer_output, table_input
from fedpa.objectives.objective import SparseTable, gather_rows
from fedpa.types import Examples, Key, Losses


class BagOfWords(eqx.Module):
    weight: Float[Array, "v t"]
    bias: Float[Array, " t"]

    def __init__(self, vocabulary: int = 10_000, tags: int = 500, *, key: Key) -> None:
        self.weight = jax.nn.initializers.glorot_uniform()(key, (vocabulary, tags))
        self.bias = jnp.zeros(tags)

    def __call__(self, ids: Int[Array, "b w"], weights: Float[Array, "b w"]) -> Float[Array, "b t"]:
        """The tags' logits."""
        return self.logits(self.weight[ids], weights)

    def logits(
        self, rows: Float[Array, "b w t"], weights: Float[Array, "b w"]
    ) -> Float[Array, "b t"]:
        """The tags' logits from the words' rows of the weight."""
        return jnp.einsum("bw,bwt->bt", weights, rows) + self.bias[None]


def outputs(params: BagOfWords, batch: Examples) -> Float[Array, "b t"]:
    """The tags' logits, the layer shown."""
    table_input(batch["ids"], params.weight, params.bias, shares=batch["weights"])
    z = _logits_of_gathered(gather_rows(SPARSE, params, batch), batch)
    return layer_output(z, params.weight)


def loss(params: BagOfWords, batch: Examples, key: Key) -> Losses:
    """Per example, the mean over tags of the sigmoid cross-entropy."""
    del key
    return _losses(outputs(params, batch), batch)


def _loss_of_gathered(params: BagOfWords, batch: Examples, key: Key) -> Losses:
    """The same with the words' rows in the weight's place."""
    del key
    return _losses(_logits_of_gathered(params, batch), batch)


def _logits_of_gathered(params: BagOfWords, batch: Examples) -> Float[Array, "b t"]:
    return params.logits(params.weight, batch["weights"].astype(params.bias.dtype))


def _losses(z: Float[Array, "b t"], batch: Examples) -> Losses:
    return jnp.mean(jax.nn.softplus(z) - z * batch["y"].astype(z.dtype), axis=1)


SPARSE = SparseTable(
    table=lambda params: params.weight,
    rows=lambda batch: batch["ids"],
    loss=_loss_of_gathered,
)
