"""A client's objective, eq. 1: f_i(θ) = 1/n_i Σ_j f(θ; z_ij), from one number per example.

The posterior it stands for, at temperature T, is p_i(θ) ∝ exp(−(n_i/T) f_i(θ)): f is a *negative*
log-likelihood (the sign printed in eq. 2 is a misprint). T = 1 is the Bayesian posterior; T = n_i
is the scale at which Σ q_i Δ_i with q_i ∝ n_i is the gradient of the mean loss, which FedPA needs.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedpa.errors import FedpaError
from fedpa.objectives.client_data import ClientData, example_weights, num_rows
from fedpa.objectives.layer_inputs import over_examples
from fedpa.objectives.minibatches import Minibatch, batch_in_order, steps_per_epoch
from fedpa.objectives.sparse_table import SparseTable, gathered
from fedpa.objectives.tracing import traced
from fedpa.precision import narrowed, widened
from fedpa.types import Examples, Key, Loss, Losses, Params, Regularizer, Scalar

Reduction = Literal["mean", "sum"]


class Objective(NamedTuple):
    """`loss(params, batch, key)` gives one number per example; we weigh and reduce them."""

    loss: Loss
    regularizer: Regularizer | None = None
    """A function of the parameters alone, added once to every (mini-batch or full) loss."""
    reduction: Reduction = "mean"
    """Of a mini-batch. `sum` makes the gradient grow with the batch; f_i stays a mean."""
    sparse: SparseTable | None = None
    """A table of which a batch reads a few rows: local SGD then leaves the others alone."""
    weight: Callable[[Examples], Losses] | None = None
    """A batch → how much each of its examples counts, 1 if not given: the words of a sentence make
    a mean over words of means over sentences. Client weights q_i count examples all the same."""
    like: Any = None
    """Some examples, or arrays' shapes: for methods that look into the model before there are any.
    `fedpa.fit` fills it in."""


def minibatch_loss(objective: Objective, theta: Params, batch: Minibatch, key: Key) -> Scalar:
    """f̂_i(θ): the loss whose gradient a step of local SGD takes."""
    losses = objective.loss(theta, batch.examples, key)
    _one_per_example(losses, batch.weights.shape[0])
    total, weight = weighed(objective, losses, batch.examples, batch.weights)
    if objective.reduction == "mean":
        total = total / _or_one(weight)
    return total + _penalty(objective, theta, total)


def client_loss(objective: Objective, theta: Params, data: ClientData, key: Key) -> Scalar:
    """f_i(θ), eq. 1: the mean loss over all of the client's examples, and the regularizer."""
    weights = example_weights(data)
    # As in a minibatch, padding repeats an example so that weight 0 removes it exactly.
    rows = jnp.where(weights > 0, jnp.arange(weights.shape[0], dtype=jnp.int32), 0)
    examples = jax.tree.map(lambda array: array[rows], data.examples)
    losses = objective.loss(theta, examples, key)
    _one_per_example(losses, weights.shape[0])
    total, weight = weighed(objective, losses, examples, weights)
    mean = total / _or_one(weight)
    return mean + _penalty(objective, theta, mean)


def log_posterior(
    objective: Objective, theta: Params, data: ClientData, temperature: float | Scalar, key: Key
) -> Scalar:
    """log p_i(θ) = −(n_i/T) f_i(θ), up to a constant."""
    value = client_loss(objective, theta, data, key)
    return -(data.n.astype(value.dtype) / temperature) * value


def weighed(
    objective: Objective, losses: Losses, examples: Examples, real: Losses
) -> tuple[Scalar, Scalar]:
    """Σ w_j f_j and Σ w_j over the real examples."""
    if objective.weight is None:
        weights = real
    else:
        weights = jnp.where(real > 0, objective.weight(examples).astype(real.dtype), 0)
        losses = losses * weights.astype(losses.dtype)
    total = jnp.sum(widened(jnp.where(real > 0, losses, 0).astype(losses.dtype)))
    return total, jnp.sum(weights).astype(total.dtype)


def _or_one(weight: Scalar) -> Scalar:
    """Where there is nothing, a mean is 0."""
    return jnp.where(weight > 0, weight, 1).astype(weight.dtype)


def client_gradient(
    objective: Objective, theta: Params, data: ClientData, key: Key, batch_size: int
) -> tuple[Scalar, Params]:
    """f_i(θ) and ∇f_i(θ), summed up mini-batch by mini-batch: memory is that of one.

    As a step of local SGD has it: with reduction `sum` both are the mean over an epoch's batches.
    """
    capacity = jax.tree.leaves(data.examples)[0].shape[0]
    order = jnp.arange(capacity, dtype=jnp.int32)
    steps = steps_per_epoch(data.n, batch_size)

    def summed(theta: Params, batch: Minibatch, key: Key) -> tuple[Scalar, Scalar]:
        losses = objective.loss(theta, batch.examples, key)
        _one_per_example(losses, batch_size)
        return weighed(objective, losses, batch.examples, batch.weights)

    def body(index: Any, carry: tuple[Scalar, Scalar, Params]) -> tuple[Scalar, Scalar, Params]:
        batch = batch_in_order(data, order, index, batch_size)
        of_batch = jax.value_and_grad(summed, has_aux=True)
        (loss, weight), gradient = of_batch(theta, batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, carry, (loss, weight, widened(gradient)))

    shapes = jax.eval_shape(body, 0, (jnp.zeros(()), jnp.zeros(()), widened(theta)))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    loss, weight, gradient = jax.lax.fori_loop(0, steps, body, start)
    count = _or_one(weight if objective.reduction == "mean" else steps.astype(weight.dtype))
    penalty, pull = jax.value_and_grad(lambda theta: _penalty(objective, theta, loss))(theta)
    mean = jax.tree.map(lambda g, p: g / count.astype(g.dtype) + widened(p), gradient, pull)
    return loss / count + penalty, narrowed(mean, theta)


def _one_per_example(losses: Any, size: int) -> None:
    shape = getattr(losses, "shape", type(losses).__name__)
    if shape != (size,):
        hint = " (wrap a loss of the whole batch in fedpa.per_example)" if shape == () else ""
        raise FedpaError(
            f"loss returns shape {shape} for a batch of {size}: it must return one number per "
            f"example, shape ({size},){hint}"
        )


def _penalty(objective: Objective, theta: Params, like: Scalar) -> Scalar:
    if objective.regularizer is None:
        return jnp.zeros_like(like)
    return jnp.asarray(objective.regularizer(theta)).astype(like.dtype)


def per_example(batch_loss: Callable[[Any, Examples, Key], Scalar]) -> Loss:
    """Turn a loss that returns one number for a whole batch into one number per example.

    `batch_loss` is called on batches of a single example, vectorized over the batch. Its value
    must therefore be that of the examples alone: no regularizer (pass it separately) and no
    statistics over the batch.
    """

    def loss(params: Any, batch: Examples, key: Key) -> Losses:
        keys = jax.random.split(key, num_rows(batch))
        alone = jax.tree.map(lambda array: array[:, None], batch)
        return over_examples(lambda example, k: batch_loss(params, example, k))(alone, keys)

    return loss


def check_loss(objective: Objective, theta: Params, examples: Any) -> None:
    """Refuse a loss that does not return one number per example. Nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    for size in (2, 3):
        batch = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype), examples
        )
        if size == 2:
            value = traced("loss", objective.loss, theta, batch, key)
        else:
            value = jax.eval_shape(objective.loss, theta, batch, key)
        _one_per_example(value, size)
        if objective.sparse is not None:
            of_rows = jax.eval_shape(functools.partial(gathered, objective.sparse), theta, batch)
            _one_per_example(jax.eval_shape(objective.sparse.loss, of_rows, batch, key), size)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise FedpaError(
                f"loss returns {value.dtype} numbers: they must be floating-point to have gradients"
            )
    if objective.weight is not None:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), examples)
        weights = traced("weight", objective.weight, batch)
        if getattr(weights, "shape", None) != (2,):
            raise FedpaError(
                f"weight returns shape {getattr(weights, 'shape', type(weights).__name__)} for a "
                "batch of 2: it must return one number per example, shape (2,)"
            )
    if objective.reduction not in ("mean", "sum"):
        raise FedpaError(f"reduction = {objective.reduction!r}: must be 'mean' or 'sum'")
    if objective.regularizer is not None:
        penalty = traced("regularizer", objective.regularizer, theta)
        if getattr(penalty, "shape", None) != ():
            raise FedpaError(
                f"regularizer returns shape {getattr(penalty, 'shape', type(penalty).__name__)}: "
                "it must return one number, shape ()"
            )
