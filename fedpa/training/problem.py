"""A problem (data, model, loss and metric), and the algorithm that a method builds for it."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from fedpa.algorithms.fedopt import BURN_IN, SAMPLING, Algorithm, stage
from fedpa.algorithms.local_training import LocalTraining
from fedpa.algorithms.methods import Described, count_population, set_population
from fedpa.data.federated import FederatedData, check_when_read
from fedpa.errors import FedpaError, check_takes, refuse
from fedpa.metrics.metric import Metric
from fedpa.objectives.checks import check_loss
from fedpa.objectives.client_data import find_bad_value, is_real
from fedpa.objectives.likelihood import Likelihood
from fedpa.objectives.objective import Objective, Reduction, SparseTable
from fedpa.objectives.prior import NormalPrior, Prior
from fedpa.server.update import Server
from fedpa.types import Examples, Key, Loss, Losses, Params, Regularizer


class Problem(NamedTuple):
    """What is trained, and the metric of its quality; tasks of the laboratory are loaded as one."""

    clients: FederatedData
    """Clients that train."""
    init: Callable[[Key], Any]
    """key → a new model, any pytree."""
    loss: Loss
    metric: Metric
    test: FederatedData
    validation: FederatedData | None = None
    """Clients on which settings are chosen."""
    regularizer: Regularizer | None = None
    reduction: Reduction = "mean"
    sparse: SparseTable | None = None
    weight: Callable[[Examples], Losses] | None = None
    eval_batch_size: int = 100
    dataset: str | None = None
    """Name of the data set, if there are several; otherwise None."""
    prior: Prior | None = None
    """Of the global posterior: counted once."""
    likelihood: Likelihood | None = None
    """How the model's outputs become probabilities; without it, nothing is known of uncertainty."""

    @property
    def objective(self) -> Objective:
        """What clients minimize, as a function of the model."""
        return Objective(
            self.loss,
            self.regularizer,
            self.reduction,
            self.sparse,
            self.weight,
            prior=self.prior,
        )


class Prepared(NamedTuple):
    """A method built for a problem."""

    algorithm: Algorithm
    theta: Params
    assemble: Callable[[Params], Any]
    """θ → the model as the user gave it."""
    objective: Objective
    """What clients minimize, as a function of θ."""


def prepare(
    objective: Objective, params: Any, data: FederatedData, method: Any, rounds: int | None
) -> Prepared:
    """Build the algorithm for this objective; `rounds`, if given, is the length of the run.

    Raises:
        FedpaError: Loss, parameters, data and method don't fit together.
    """
    check_takes("loss", objective.loss, "(params, batch, key)")
    objective, theta, assemble = bind(objective, params)
    objective = complete(objective, data)
    check_loss(objective, theta, objective.like)
    if isinstance(method, Algorithm):
        raise refuse(
            "method", method, "is an algorithm: give the method, a function of the objective"
        )
    algorithm: Any = None
    if callable(method):
        _check_called(method, objective)
        population = count_population(method, map(data.num_examples, data.ids))
        algorithm = set_population(method, population)(objective)
    if isinstance(method, LocalTraining | Server):
        kind = type(method).__name__
        raise refuse(
            "method", method, f"must be an algorithm: fedpa.fedavg(local, server) takes a {kind}"
        )
    if algorithm is not None and not isinstance(algorithm, Algorithm):
        made = "must return an algorithm, as fedpa.fedopt(server, clients) gives"
        raise refuse("method's answer", algorithm, made)
    if algorithm is None:
        raise refuse("method", method, "must be an algorithm, as fedpa.fedavg(local, server) gives")
    if rounds is not None:
        _warn_of_no_sampling(algorithm, rounds)
        _warn_of_weights(algorithm, method, data)
    return Prepared(algorithm, theta, assemble, objective)


def _check_called(method: Any, problem: Objective) -> None:
    """Refuse a builder of methods that was not called: fedpa.fedavg."""
    name = getattr(method, "__qualname__", "")
    ours = getattr(method, "__module__", "").startswith("fedpa.algorithms")
    try:
        signature = inspect.signature(method)
        if not (ours and name.isidentifier()):  # a method that it builds is local to it
            signature.bind(problem)
            return
    except ValueError:  # functions not written in Python have no signature
        return
    except TypeError:
        pass
    needed = [
        f"{field}=…" if parameter.kind is parameter.KEYWORD_ONLY else field
        for field, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
    ]
    call = f"{'fedpa.' if ours else ''}{name}({', '.join(needed)})"
    raise FedpaError(f"method = {name}: must be called with its settings, {call}")


def some_examples(data: FederatedData) -> Any:
    """Read the examples of the first client that has any."""
    some = next((name for name in data.ids if data.num_examples(name) > 0), data.ids[0])
    return check_when_read(data).examples(some)


def complete(objective: Objective, data: FederatedData) -> Objective:
    """Tell an objective what methods and priors have to know of the clients that train."""
    if objective.num_examples is None:
        objective = objective._replace(num_examples=count_examples(data))
    return objective._replace(like=some_examples(data))


def count_examples(data: FederatedData) -> int:
    """n, of all clients together; at least 1, to divide by."""
    return max(sum(map(data.num_examples, data.ids)), 1)


def split_params(params: Any) -> tuple[Params, Callable[[Params], Any]]:
    """Split `params` into its floating-point arrays θ, and what puts θ back in its place."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        _check_parameter(jax.tree_util.keystr(path) or "array", leaf)
    theta, rest = eqx.partition(jax.tree.map(_move, params), eqx.is_inexact_array)
    if not jax.tree.leaves(theta):
        raise FedpaError(
            "params has no floating-point arrays, and integers are not trained: give floats"
        )
    return theta, lambda theta: eqx.combine(theta, rest)


def bind(objective: Objective, params: Any) -> tuple[Objective, Params, Callable[[Params], Any]]:
    """Split `params` into its floating-point arrays θ and the rest.

    Returns:
        The objective as a function of θ; θ; and θ → params.
    """
    theta, assemble = split_params(params)
    loss, regularizer, sparse = objective.loss, objective.regularizer, objective.sparse

    def bound_loss(theta: Params, batch: Examples, key: Key) -> Any:  # checked by check_loss
        return loss(assemble(theta), batch, key)

    penalty = None if regularizer is None else (lambda theta: regularizer(assemble(theta)))
    if sparse is not None:
        of_rows = sparse.loss
        sparse = sparse._replace(
            loss=lambda theta, batch, key: of_rows(assemble(theta), batch, key)
        )
    prior = objective.prior
    if isinstance(prior, NormalPrior):
        prior = prior.restrict(jax.tree.map(_move, params), eqx.is_inexact_array)
    elif isinstance(prior, Prior):
        prior = _PriorOfModel(prior, assemble)
    bound = objective._replace(loss=bound_loss, regularizer=penalty, sparse=sparse, prior=prior)
    return bound, theta, assemble


class _PriorOfModel(NamedTuple):
    """A prior of the user's own as a function of θ."""

    prior: Prior
    assemble: Callable[[Params], Any]

    def log_density(self, theta: Params) -> Any:
        return self.prior.log_density(self.assemble(theta))


def _warn_of_no_sampling(algorithm: Algorithm, rounds: int) -> None:
    if algorithm.switch is not None:
        return
    if SAMPLING in algorithm.clients and stage(algorithm.phase(rounds - 1)) == BURN_IN:
        warnings.warn(
            f"all {rounds} rounds are burn-in, which is FedAvg: nothing is sampled. "
            "Lower burn_in_rounds or raise rounds",
            stacklevel=3,
        )


UNEQUAL = 1.5
"""Largest ratio of clients' sizes that makes no difference worth a warning."""


def _warn_of_weights(algorithm: Algorithm, method: Any, data: FederatedData) -> None:
    """Warn if clients were to count by their examples, and the aggregation ignores that."""
    if algorithm.aggregation.is_weighted or not isinstance(method, Described):
        return
    sizes = {data.num_examples(name) for name in data.ids} - {0}
    is_unequal = max(sizes, default=1) > UNEQUAL * min(sizes, default=1)
    if is_unequal and method.settings().get("weighting") == "examples":
        warnings.warn(
            f"weighting = 'examples': the aggregation ignores weights, clients of {min(sizes):,} "
            f"and {max(sizes):,} examples count the same. weighting = 'uniform' says so",
            stacklevel=4,
        )


def _check_parameter(where: str, leaf: Any) -> None:
    """Refuse complex and non-finite numbers, and numbers that JAX would change."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        return
    if jnp.issubdtype(leaf.dtype, jnp.inexact) and not is_real(leaf.dtype):
        raise FedpaError(
            f"params: {where} has type {leaf.dtype}: must be real numbers of at most 64 bits"
        )
    if is_real(leaf.dtype):
        array = np.asarray(leaf)  # on the host: nothing to compile
        bad = find_bad_value(array)
        if bad is not None:
            index, expected = bad
            place = f"{where}{index}" if index else where
            raise FedpaError(f"params: {place} = {array[tuple(index)]}: {expected}")


def _move(leaf: Any) -> Any:
    """Copy NumPy's numbers to the device; other leaves stay unchanged."""
    if not isinstance(leaf, np.ndarray) or not is_real(leaf.dtype) or leaf.dtype == bool:
        return leaf
    # `jnp.asarray` would compile a program for every shape. JAX has no arrays of the other byte
    # order.
    return jax.device_put(np.array(leaf, leaf.dtype.newbyteorder("=")))
