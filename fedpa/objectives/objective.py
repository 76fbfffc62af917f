"""A client's objective, eq. 1: f_i(θ) = 1/n_i Σ_j f(θ; z_ij), from one number per example.

The posterior it stands for, at temperature T, is p_i(θ) ∝ exp(−(n_i/T) f_i(θ)): f is a *negative*
log-likelihood (the sign printed in eq. 2 is a misprint). T = 1 is the Bayesian posterior; T = n_i
is the scale at which Σ q_i Δ_i with q_i ∝ n_i is the gradient of the mean loss, which FedPA needs.

With a prior p(θ), f_i has the term −log p(θ)/n, n the examples of all clients together: at T = 1
client i's posterior holds the share p(θ)^{n_i/n}, and the product over clients p(θ), once.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Inexact, Int, PyTree

from fedpa.errors import FedpaError, refuse
from fedpa.objectives.client_data import ClientData, example_weights
from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.prior import Prior
from fedpa.precision import widen
from fedpa.types import Count, Examples, Key, Loss, Losses, Model, Params, Regularizer, Scalar

Reduction = Literal["mean", "sum"]


class SparseTable(NamedTuple):
    """A parameter that is a table of which a mini-batch reads a few rows: the vectors of its words.

    The gradient with respect to such a table is 0 in every other row. With the loss as a function
    of the rows alone, local SGD leaves the others untouched (`fedpa/samplers/sparse_step.py`):
    `loss(θ, batch, key) = sparse.loss(gather_rows(sparse, θ, batch), batch, key)`.

    Args:
        table: θ → the table, one of its leaves.
        rows: A batch → the numbers of the rows it reads, as often as it reads them, in any shape.
        loss: The loss of parameters that have these rows, shape (*ids, d), in the table's place.
    Example:
        >>> def of_rows(params, batch, key):  # params["words"]: (examples, words, d)
        ...     return ((params["words"].sum(1) @ params["w"]) - batch["y"]) ** 2
        >>> sparse = SparseTable(lambda p: p["words"], lambda batch: batch["ids"], of_rows)
        >>> theta = {"words": jnp.ones((10, 3)), "w": jnp.ones(3)}
        >>> batch = {"ids": jnp.zeros((2, 4), jnp.int32), "y": jnp.zeros(2)}
        >>> of_rows({**theta, "words": theta["words"][batch["ids"]]}, batch, None).shape
        (2,)
    """

    table: Callable[[Model], Inexact[Array, "v d"]]
    rows: Callable[[Examples], Int[Array, "*ids"]]
    loss: Loss


class Objective(NamedTuple):
    """A client's objective f_i(θ) = 1/n_i Σ_j f(θ; z_ij) (eq. 1), from one number per example.

    Args:
        loss: `loss(params, batch, key)` → one number per example, shape (b,).
        regularizer: A function of the parameters alone, added once to every (mini-batch or full)
            loss, whatever the reduction (default: None). The loss is a mean, so in the posterior it
            counts once for every example: a penalty ½ ‖θ‖²/s² is a prior of sd s/√n, 0.2 for s = 2
            and 100 examples. Use `prior` for a prior that is counted once.
        reduction: Of a mini-batch. `sum` makes the gradient grow with the batch, the prior's share
            with it; the regularizer is added once. f_i stays a mean (default: "mean").
        sparse: A table of which a batch reads a few rows: local SGD then leaves the others alone
            (default: None).
        weight: A batch → how much each of its examples counts, 1 if not given: the words of a
            sentence make a mean over words of means over sentences. Client weights q_i count
            examples all the same (default: None).
        like: Some examples, or arrays' shapes: for methods that look into the model before there
            are any. `fedpa.fit` fills it in (default: None).
        prior: p(θ) of the global posterior, counted once: `fedpa.normal_prior(sd=2.0)`. Every
            example has the share −log p(θ)/n (default: None).
        num_examples: n, the examples of all clients together, which a prior needs. `fedpa.fit`
            fills it in (default: None).
    Example:
        >>> def loss(params, batch, key):
        ...     return (batch["x"] @ params["w"] - batch["y"]) ** 2
        >>> objective = fedpa.Objective(loss, prior=fedpa.normal_prior(sd=2.0))
    """

    loss: Loss
    regularizer: Regularizer | None = None
    reduction: Reduction = "mean"
    sparse: SparseTable | None = None
    weight: Callable[[Examples], Losses] | None = None
    like: PyTree = None
    prior: Prior | None = None
    num_examples: int | float | Scalar | Count | None = None


def minibatch_loss(objective: Objective, theta: Params, batch: Minibatch, key: Key) -> Scalar:
    """f̂_i(θ): the loss whose gradient a step of local SGD takes."""
    total, weight = sum_losses(objective, theta, batch.examples, batch.weights, key)
    if objective.reduction == "mean":
        total, weight = total / or_one(weight), jnp.ones_like(weight)
    return total + penalty(objective, theta, total, weight)


def client_loss(objective: Objective, theta: Params, data: ClientData, key: Key) -> Scalar:
    """Compute f_i(θ) (eq. 1): the mean loss over all of a client's examples, plus the regularizer.

    With a prior also plus −log p(θ)/n, n the examples of all clients together.

    Args:
        objective: The loss.
        theta: θ.
        data: From `client_data`.
        key: For a loss that is random.
    Returns:
        A number; for an empty client 0 plus the regularizer and the prior's term.
    Example:
        >>> objective = Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> client_loss(objective, jnp.zeros(2), data, jax.random.key(0)).item()
        2.5
    """
    real = example_weights(data)
    # As in a minibatch, padding repeats an example so that weight 0 removes it exactly.
    rows = jnp.where(real > 0, jnp.arange(real.shape[0], dtype=jnp.int32), 0)
    examples = jax.tree.map(lambda array: array[rows], data.examples)
    total, weight = sum_losses(objective, theta, examples, real, key)
    mean = total / or_one(weight)
    return mean + penalty(objective, theta, mean, jnp.ones_like(mean))


def log_posterior(
    objective: Objective, theta: Params, data: ClientData, temperature: float | Scalar, key: Key
) -> Scalar:
    """Compute log p_i(θ) = −(n_i/T) f_i(θ), up to a constant (eq. 2, which drops the 1/n).

    With a prior, at T = 1, it is Σ_j log p(z_ij | θ) + (n_i/n) log p(θ): the sum over all clients
    has log p(θ) once.

    Args:
        objective: The loss.
        theta: θ.
        data: From `client_data`.
        temperature: T > 0; 1 is the Bayesian posterior.
        key: For a loss that is random.
    Returns:
        A number.
    Example:
        >>> objective = Objective(fedpa.objectives.least_squares.loss)
        >>> data = fedpa.objectives.client_data({"x": np.eye(2), "y": np.array([1.0, 3.0])})
        >>> log_posterior(objective, jnp.zeros(2), data, 1.0, jax.random.key(0)).item()
        -5.0
    """
    value = client_loss(objective, theta, data, key)
    return -(data.n.astype(value.dtype) / temperature) * value


def sum_losses(
    objective: Objective, theta: Params, examples: Examples, real: Losses, key: Key
) -> tuple[Scalar, Scalar]:
    """Σ w_j f_j and Σ w_j over the examples that are `real`, 1, and not padding, 0."""
    losses = objective.loss(theta, examples, key)
    check_one_per_example(losses, real.shape[0])
    weights = real
    if objective.weight is not None:
        weights = jnp.where(real > 0, objective.weight(examples).astype(real.dtype), 0)
        losses = losses * weights.astype(losses.dtype)
    total = jnp.sum(widen(jnp.where(real > 0, losses, 0).astype(losses.dtype)))
    return total, jnp.sum(weights).astype(total.dtype)


def or_one(weight: Scalar) -> Scalar:
    """What to divide by: where there is nothing, a mean is 0."""
    return jnp.where(weight > 0, weight, 1).astype(weight.dtype)


def penalty(objective: Objective, theta: Params, like: Scalar, examples: Scalar) -> Scalar:
    """The regularizer plus the prior's share −examples · log p(θ)/n, in the dtype of `like`.

    examples: for how many examples the loss stands to which it is added: 1 for a mean.
    """
    added = jnp.zeros_like(like)
    if objective.regularizer is not None:
        added = jnp.asarray(objective.regularizer(theta)).astype(like.dtype)
    if objective.prior is not None:
        share = examples.astype(like.dtype) / _count_all(objective).astype(like.dtype)
        added -= share * jnp.asarray(objective.prior.log_density(theta)).astype(like.dtype)
    return added


def has_penalty(objective: Objective) -> bool:
    """Whether something pulls at every parameter, whatever examples a batch has."""
    return objective.regularizer is not None or objective.prior is not None


def _count_all(objective: Objective) -> Scalar | Count:
    if objective.num_examples is None:
        raise refuse(
            "num_examples",
            None,
            "a prior counts once for all clients together: give "
            "fedpa.Objective(loss, prior=…, num_examples=n), n the examples of all clients "
            "(fedpa.fit does it by itself)",
        )
    return jnp.asarray(objective.num_examples)


def check_one_per_example(losses: Any, size: int) -> None:
    shape = getattr(losses, "shape", type(losses).__name__)
    if shape != (size,):
        hint = " (wrap a loss of the whole batch in fedpa.per_example)" if shape == () else ""
        raise FedpaError(
            f"loss returns shape {shape} for a batch of {size}: it must return one number per "
            f"example, shape ({size},){hint}"
        )


def replace_table(sparse: SparseTable, theta: Params, leaf: Inexact[Array, "..."]) -> Params:
    """θ with `leaf` in the table's place."""
    return eqx.tree_at(sparse.table, theta, leaf)


def gather_rows(sparse: SparseTable, theta: Params, batch: Examples) -> Params:
    """θ with the rows that the batch reads in the table's place."""
    return replace_table(sparse, theta, sparse.table(theta)[sparse.rows(batch)])
