"""A client's Fisher matrix Σ_j J_jᵀ H_j J_j at θ, in the structure that it is sent in.

J_j = ∂f/∂θ are the derivatives of the outputs for example j, H_j the likelihood's curvature there
(`fedpa.objectives.Likelihood`). For softmax, sigmoid and normal outputs it is also the Gauss–Newton
matrix: the Hessian of −log p(y | f) without the curvature of f. It is a sum over examples, so that
clients' sums add up to that of the pooled data.

    dense       Σ JᵀHJ                             parameters that are few, say of the last layer
    diagonal    its diagonal
    low rank    Σ JᵀHJ Ω, Ω of s random columns, the same for all clients
    kronecker   Σ aaᵀ and Σ ggᵀ for each layer (K-FAC)

The Kronecker factors and the diagonal need vectors g of outputs with E[ggᵀ] = H:

    sampled     g = Sv, v random signs: one backward pass; labels drawn from the model have the same
                second moments
    all         g = S e_k for each output k, summed: as many backward passes as outputs, and no
                noise where an example has one label (else the signs of its labels are random)
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.objectives.client_data import ClientData
from fedpa.objectives.likelihood import Likelihood, Outputs
from fedpa.objectives.minibatches import Minibatch, sum_batches
from fedpa.objectives.objective import Objective
from fedpa.objectives.tangent import linearize
from fedpa.precision import ravel, widen
from fedpa.precisions.dense import Dense
from fedpa.precisions.diagonal import Diagonal
from fedpa.precisions.kronecker import signs
from fedpa.precisions.layered import Layered, layer_precision
from fedpa.precisions.low_rank import LowRank, draw_directions, from_products
from fedpa.types import Count, Examples, Key, Losses, Params

Labels = Literal["sampled", "all"]
"""Which vectors g stand for the labels."""
Matrix = Float[Array, "d s"]
LARGEST_DENSE = 8192
"""Parameters of a dense Fisher matrix, at most."""
Restore = Callable[[Params], Any]


class Fisher(NamedTuple):
    """How a Fisher matrix is computed, sent and used, in one structure.

    Args:
        of_client: (outputs as a function of θ, θ, the client's data, key) → what is sent; it adds
            up over clients as arrays do.
        precision: (the sum of what was sent, θ) → a precision over θ, without a prior.
        is_vector: Whether that is over θ ravelled to one vector.
    Example:
        >>> fisher = dense_fisher()
        >>> likelihood = fedpa.objectives.Likelihood(lambda w, batch: batch["x"] @ w, "normal")
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.ones(2)})
        >>> sent = fisher.of_client(likelihood, jnp.zeros(2), data, jax.random.key(0))
        >>> fisher.precision(sent, jnp.zeros(2)).times(jnp.ones(2)).tolist()
        [1.0, 1.0]
    """

    of_client: Callable[[Likelihood, Params, ClientData, Key], Any]
    precision: Callable[[Any, Params], Any]
    is_vector: bool = True


def dense_fisher(*, batch_size: int = 32) -> Fisher:
    """The whole matrix, of at most 8,192 parameters.

    Args:
        batch_size: Examples at a time.
    Returns:
        The structure.
    Example:
        >>> fisher = dense_fisher(batch_size=16)
    """
    check_integer("batch_size", batch_size, 1)

    def of_client(likelihood: Likelihood, theta: Params, data: ClientData, key: Key) -> Matrix:
        vector, restore = ravel(theta)
        if len(vector) > LARGEST_DENSE:
            raise FedpaError(
                f"structure = 'last-layer': {len(vector):,} parameters make a matrix of "
                f"{len(vector):,} × {len(vector):,}, and the most is {LARGEST_DENSE:,}: "
                "'kronecker' and 'diagonal' fit"
            )

        def outputs(v: Array, example: Any) -> Array:
            return _outputs_of_one(likelihood, restore(v), example)

        def of_batch(index: Count, batch: Minibatch) -> Matrix:
            f = widen(likelihood.outputs(theta, batch.examples))
            rows = widen(jax.vmap(jax.jacrev(outputs), (None, 0))(vector, batch.examples))

            def curve(column: Array) -> Array:
                return _weigh(likelihood.curvature(f, column, batch.examples), batch)

            curved = jax.vmap(curve, -1, -1)(rows)
            flat = (-1, len(vector))
            product: Matrix = rows.reshape(flat).T @ curved.reshape(flat).astype(rows.dtype)
            return product

        total: Matrix = sum_batches(of_batch, data, _at_most(batch_size, data))
        return total

    return Fisher(of_client, lambda matrix, theta: Dense(0.5 * (matrix + matrix.T)))


def diagonal_fisher(labels: Labels = "sampled", *, batch_size: int = 16) -> Fisher:
    """The diagonal.

    Args:
        labels: "sampled" or "all".
        batch_size: Examples at a time, whose gradients are held.
    Returns:
        The structure.
    Example:
        >>> fisher = diagonal_fisher("all")
    """
    check_labels(labels)
    check_integer("batch_size", batch_size, 1)

    def of_client(likelihood: Likelihood, theta: Params, data: ClientData, key: Key) -> Array:
        vector, restore = ravel(theta)

        def squares(likely: Likelihood, batch: Minibatch, key: Key, k: Any) -> Array:
            def loss(v: Array, example: Any, key: Key) -> Array:
                alone = jax.tree.map(lambda x: x[None], example)
                return _pseudo_loss(likely, restore(v), alone, key, k)[0]

            keys = jax.random.split(key, len(batch.weights))
            gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(vector, batch.examples, keys)
            return jnp.sum(jnp.where(batch.weights[:, None] > 0, gradients**2, 0), axis=0)

        def of_batch(index: Count, batch: Minibatch) -> Array:
            def one(k: Any) -> Array:
                return squares(likelihood, batch, jax.random.fold_in(key, index), k)

            found: Array = _over_labels(one, labels, likelihood, theta, batch.examples)
            return found

        total: Array = sum_batches(of_batch, data, _at_most(batch_size, data))
        return total

    return Fisher(of_client, lambda squares, theta: Diagonal(squares))


def low_rank_fisher(
    rank: int = 10, labels: Labels = "sampled", *, batch_size: int = 64, seed: int = 0
) -> Fisher:
    """The Nyström approximation UUᵀ from products with random directions, plus a diagonal.

    δ = max(diag F − diag UUᵀ, 0), diag F from `diagonal_fisher`: what the directions miss has its
    variances, if no correlations.

    Args:
        rank: s ≥ 1: its cost is that of about s epochs.
        labels: "sampled" or "all", of the diagonal.
        batch_size: Examples at a time, of products.
        seed: Of the directions, which all clients share.
    Returns:
        The structure.
    Example:
        >>> fisher = low_rank_fisher(rank=20)
    """
    check_integer("rank", rank, 1)
    check_integer("batch_size", batch_size, 1)

    squares = diagonal_fisher(labels)

    def directions(theta: Params) -> Matrix:
        vector, _ = ravel(theta)
        return draw_directions(jax.random.key(seed), len(vector), min(rank, len(vector)))

    def of_client(
        likelihood: Likelihood, theta: Params, data: ClientData, key: Key
    ) -> tuple[Matrix, Array]:
        vector, restore = ravel(theta)
        omega = directions(theta).T.astype(vector.dtype)

        def of_batch(index: Count, batch: Minibatch) -> Matrix:
            def outputs(v: Array) -> Array:
                f: Array = widen(likelihood.outputs(restore(v), batch.examples))
                return f

            f, push, pull = linearize(outputs, vector)

            def product(column: Array) -> Array:
                curved = likelihood.curvature(f, push(column), batch.examples)
                back: Array = pull(_weigh(curved, batch).astype(f.dtype))
                return back

            products: Matrix = jax.lax.map(product, omega).T
            return products

        total: Matrix = sum_batches(of_batch, data, _at_most(batch_size, data))
        return total, squares.of_client(likelihood, theta, data, key)

    def precision(sent: tuple[Matrix, Array], theta: Params) -> LowRank:
        products, diagonal = sent
        found = from_products(products, directions(theta), diagonal)
        inside = jnp.sum(found.columns**2, axis=1)
        return found._replace(diagonal=jnp.maximum(diagonal - inside, 0))

    return Fisher(of_client, precision)


def kronecker_fisher(
    labels: Labels = "sampled", *, block: int = 2048, batch_size: int = 100
) -> Fisher:
    """Both factors of every layer that the model shows (K-FAC); the diagonal of other parameters.

    Args:
        labels: "sampled" or "all".
        block: Factors with more rows are block-diagonal, in blocks of at most this size.
        batch_size: Examples at a time. The factors are added once for each batch: for a CNN small
            batches take half as long again.
    Returns:
        The structure.
    Example:
        >>> fisher = kronecker_fisher(block=512)
    """
    check_labels(labels)

    def of_client(likelihood: Likelihood, theta: Params, data: ClientData, key: Key) -> Layered:
        def one(k: Any) -> Layered:
            def loss(theta: Params, batch: Examples, key: Key) -> Losses:
                return _pseudo_loss(likelihood, theta, batch, key, k)

            size = _at_most(batch_size, data)
            return layer_precision(Objective(loss), theta, data, key, batch_size=size, block=block)

        found: Layered = _over_labels(one, labels, likelihood, theta, data.examples)
        return found

    return Fisher(of_client, lambda total, theta: total, is_vector=False)


def _at_most(batch_size: int, data: ClientData) -> int:
    """The batch size, or what the client has room for: no batch is mostly padding."""
    capacity: int = jax.tree.leaves(data.examples)[0].shape[0]
    return min(batch_size, max(1, capacity))


def check_labels(labels: Any) -> None:
    if labels not in get_args(Labels):
        raise refuse("labels", labels, "must be 'sampled' or 'all'")


def _outputs_of_one(likelihood: Likelihood, theta: Params, example: Any) -> Array:
    """f of one example, without its axis of examples."""
    alone = jax.tree.map(lambda x: x[None], example)
    f: Array = widen(likelihood.outputs(theta, alone))[0]
    return f


def _weigh(values: Outputs, batch: Minibatch) -> Outputs:
    """0 for padded examples."""
    real = batch.weights.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(real > 0, values, 0)


def _pseudo_loss(
    likelihood: Likelihood, theta: Params, batch: Examples, key: Key, k: Any
) -> Losses:
    """gᵀf of each example, whose gradient is Jᵀg: g = Sv, v of random signs, or those of output k.

    k: None, or the number of an output.
    """
    f = widen(likelihood.outputs(theta, batch))
    v = signs(key, 1, f.size, f.dtype).reshape(f.shape)
    if k is not None and f.ndim > 1:  # an example has several places: their signs stay random
        v = jnp.where(jax.lax.broadcasted_iota(jnp.int32, f.shape, f.ndim - 1) == k, v, 0)
    g = jax.lax.stop_gradient(likelihood.curvature_root(jax.lax.stop_gradient(f), v, batch))
    return jnp.sum((g * f).reshape(len(f), -1), axis=1)


def _over_labels(
    one: Callable[[Any], Any],
    labels: Labels,
    likelihood: Likelihood,
    theta: Params,
    examples: Examples,
) -> Any:
    """`one` of random signs, or its sum over all outputs."""
    f = jax.eval_shape(likelihood.outputs, theta, examples)
    if labels == "sampled" or f.ndim == 1:
        return one(None)
    numbers = jnp.arange(1, f.shape[-1], dtype=jnp.int32)

    def add(total: Any, k: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(k)), None

    total, _ = jax.lax.scan(add, one(jnp.zeros((), jnp.int32)), numbers)
    return total
