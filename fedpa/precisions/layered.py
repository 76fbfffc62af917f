"""A precision over a whole model: Kronecker factors for each layer, a scalar or diagonal elsewhere.

Layers are those that the model shows (`fedpa.layer_input` or `fedpa.table_input`, and
`fedpa.layer_output`): dense, convolutional, recurrent and embedding layers alike, each as its
matrix [b; W].
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import FedpaError, check_integer
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.layer_inputs import (
    Layer,
    Rows,
    Squares,
    observe,
    output_gradients,
    stack_layer,
    unstack_layer,
)
from fedpa.objectives.minibatches import Minibatch, sum_batches
from fedpa.objectives.objective import Objective
from fedpa.precision import widen
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.kronecker import Blocks, Cut, KroneckerPair, cut, cut_layer, split_rows
from fedpa.precisions.precision import Precision
from fedpa.types import Count, Examples, Key, Params, Scalar


class Layered(NamedTuple):
    """A Gaussian precision over a pytree of parameters: Λ is block-diagonal, a block per layer.

    A `fedpa.Precision` whose v and `like` are pytrees. Without layers, `rest` is one precision per
    leaf, as a prior has it.

    Args:
        layers: Which leaves are the matrix [b; W] of each layer; no leaf belongs to two.
        factors: Their precisions: `Kronecker` or `KroneckerPair`, or its `Eigenbasis`.
        rest: The precisions of leaves that belong to no layer, in their order: `Scalar` or
            `Diagonal`.
    Example:
        >>> from fedpa.precisions import Scalar
        >>> prior = Layered((), (), (Scalar(jnp.float32(4)), Scalar(jnp.float32(1))))
        >>> prior.times({"b": jnp.ones(1), "w": jnp.ones(2)})
        {'b': Array([4.], dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """

    layers: tuple[Layer, ...]
    factors: tuple[Any, ...]
    rest: tuple[Any, ...]

    def add(self, other: "Layered") -> "Layered":
        """Λ + Λ′ as each part adds, of the same layers."""
        return self._of_parts(lambda one, more: one.add(more), other)

    def add_identity(self, factor: float | Scalar = 1.0) -> "Layered":
        """Λ + cI."""
        return self._of_parts(lambda one: one.add_identity(factor))

    def scale(self, factor: float | Scalar) -> "Layered":
        """cΛ."""
        return self._of_parts(lambda one: one.scale(factor))

    def times(self, v: Params) -> Params:
        """Λv."""
        return self._apply(lambda one, part: one.times(part), v)

    def solve(self, v: Params) -> Params:
        """Λ⁻¹v, for Λ positive definite."""
        return self._apply(lambda one, part: one.solve(part), v)

    def sample(self, like: Params, key: Key) -> Params:
        """One draw of N(0, Λ⁻¹), of the shapes and dtypes of `like`."""
        keys: Iterator[Key] = iter(jax.random.split(key, len(self.factors) + len(self.rest)))
        return self._apply(lambda one, part: one.sample(part, next(keys)), like)

    def logdet(self, like: Params) -> Scalar:
        """log det Λ over parameters of the shapes of `like`."""
        leaves, places = jax.tree.leaves(like), self._rest_places(like)
        parts = [stack_layer(layer, like) for layer in self.layers] + [leaves[i] for i in places]
        both = zip((*self.factors, *self.rest), parts, strict=True)
        return jnp.sum(jnp.stack([one.logdet(part) for one, part in both]))

    def variances(self, like: Params) -> Params:
        """The diagonal of Λ⁻¹, of the shapes and dtypes of `like`."""
        return self._apply(lambda one, part: one.variances(part), like)

    def factorize(self) -> "Layered":
        """Λ with each `KroneckerPair` as its `Eigenbasis`: computed once for many solves and draws.

        It can be scaled and added to λI, but not to another precision.
        """

        def factorize(one: Any) -> Any:
            return one.factorize() if isinstance(one, KroneckerPair) else one

        return self._of_parts(factorize)

    @property
    def num_numbers(self) -> int:
        """The sum of the parts'."""
        return sum(one.num_numbers for one in (*self.factors, *self.rest))

    def _of_parts(self, function: Callable[..., Any], *others: "Layered") -> "Layered":
        return Layered(
            self.layers,
            tuple(map(function, self.factors, *(other.factors for other in others))),
            tuple(map(function, self.rest, *(other.rest for other in others))),
        )

    def _apply(self, function: Callable[[Any, Array], Array], v: Params) -> Params:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            v = unstack_layer(layer, function(factor, stack_layer(layer, v)), v)
        leaves, structure = jax.tree.flatten(v)
        for one, place in zip(self.rest, self._rest_places(v), strict=True):
            leaves[place] = function(one, leaves[place])
        return jax.tree.unflatten(structure, leaves)

    def _rest_places(self, v: Params) -> list[int]:
        """The numbers of the leaves that belong to no layer."""
        places = _outside(self.layers, len(jax.tree.leaves(v)))
        if len(places) != len(self.rest):
            raise FedpaError(
                f"v has {len(places)} arrays that belong to no layer, the precision is over "
                f"{len(self.rest)}: pass parameters of the structure that it was made for"
            )
        return places


if TYPE_CHECKING:
    _: type[Precision] = Layered


def _outside(layers: tuple[Layer, ...], count: int) -> list[int]:
    within = {place for layer in layers for place in (*layer.weights, layer.bias)}
    return [place for place in range(count) if place not in within]


def layer_precision(
    objective: Objective,
    theta: Params,
    data: ClientData,
    key: Key,
    *,
    batch_size: int = 32,
    block: int = 2048,
) -> Layered:
    """Compute a client's Fisher matrix at θ, K-FAC for each layer, from one pass over its examples.

    A layer whose input and output are shown (`fedpa.layer_input` or `fedpa.table_input`, and
    `fedpa.layer_output`) has both factors, Σaaᵀ and Σggᵀ (`KroneckerPair`), of the rows that are
    not padding. Other parameters have the diagonal Σ_j (∂ℓ_j/∂θ)².
    Both are sums over examples of −log-likelihoods ℓ_j: no prior, no regularizer. Those of several
    clients add up to the pooled examples'.

    Gradients are those of the loss as it is: with the data's labels this is the empirical Fisher
    matrix; a loss that draws labels from the model, by its key, gives the Fisher matrix itself.

    Args:
        objective: The loss.
        theta: θ.
        data: From `fedpa.objectives.client_data`.
        key: For a loss that is random.
        batch_size: Examples at a time; parameters outside of layers take as many gradients' memory.
        block: Σaaᵀ of a layer with more inputs, and Σggᵀ of one with more outputs, is
            block-diagonal, in blocks of at most this size. Σaaᵀ of a table is diagonal.
    Returns:
        Λ, which need not be positive definite: add a prior by `add_identity`.
    Example:
        >>> objective = fedpa.Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.ones(2)})
        >>> precision = layer_precision(objective, jnp.zeros(2), data, jax.random.key(0))
        >>> precision.times(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    check_integer("batch_size", batch_size, 1)
    check_integer("block", block, 1)

    def of_batch(index: Count, batch: Minibatch) -> Layered:
        k = jax.random.fold_in(key, index)
        seen = observe(objective.loss, theta, batch.examples, batch.weights, k)
        gradients = output_gradients(objective.loss, theta, batch.examples, batch.weights, k)
        layers = tuple(layer for layer in seen if layer.weights[0] in gradients)
        pairs = [_pair(layer, seen[layer], gradients[layer.weights[0]], block) for layer in layers]
        places = _outside(layers, len(jax.tree.leaves(theta)))
        squares = _squared_gradients(objective, theta, places, batch.examples, batch.weights, k)
        return Layered(layers, tuple(pairs), tuple(map(Diagonal, squares)))

    total: Layered = sum_batches(of_batch, data, batch_size)
    return total


def _pair(layer: Layer, seen: Rows | Squares, gradients: Array, block: int) -> KroneckerPair:
    wanted = (len(seen.real), layer.outputs)
    if gradients.shape != wanted:
        raise FedpaError(
            f"layer_output is shown {gradients.shape} rows and outputs of a layer that has "
            f"{wanted}: show what leaves the layer for all that enters it"
        )
    if isinstance(seen, Squares):
        inputs = seen.sums[:, None, None]
    else:
        inputs = _gram(seen.x, cut_layer(layer, block))
    outputs = _gram(jnp.where(seen.real[:, None] > 0, gradients, 0), cut(layer.outputs, block))
    parts = (inputs, outputs, jnp.sum(seen.real), jnp.zeros(()))
    return KroneckerPair(*(part.astype(outputs.dtype) for part in parts))  # counts are float32


def _gram(rows: Float[Array, "n c"], cut: Cut) -> Blocks:
    """The diagonal blocks of Σ xxᵀ."""
    x = split_rows(rows.T, cut)
    return x @ x.mT


def _squared_gradients(
    objective: Objective,
    theta: Params,
    places: list[int],
    examples: Examples,
    weights: Array,
    key: Key,
) -> list[Array]:
    """Σ_j (∂ℓ_j/∂θ)² of some leaves of θ."""
    leaves, structure = jax.tree.flatten(theta)

    def loss(some: list[Array], example: Any, k: Key) -> Scalar:
        whole = list(leaves)
        for place, leaf in zip(places, some, strict=True):
            whole[place] = leaf
        alone = jax.tree.map(lambda x: x[None], example)
        return objective.loss(jax.tree.unflatten(structure, whole), alone, k)[0]

    def squares(example: Any, weight: Scalar, k: Key) -> list[Array]:
        gradients = jax.grad(loss)([leaves[place] for place in places], example, k)
        return [jnp.where(weight > 0, g**2, 0).astype(g.dtype) for g in widen(gradients)]

    if not places:
        return []
    each = jax.vmap(squares)(examples, weights, jax.random.split(key, len(weights)))
    return [jnp.sum(x, axis=0) for x in each]
