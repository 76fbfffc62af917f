"""Checks of a user's loss: one number per example, and the same function at every call.

Compiling runs a function once, on placeholders for its numbers. A function that needs the numbers
themselves fails then; one that uses what it stored in an earlier call meets a placeholder that is
gone; one with randomness or counters of its own repeats what the first call happened to give.
All are refused here, by name and where possible by line, before anything is compiled.
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedpa.errors import FedpaError, refuse
from fedpa.objectives.objective import Objective, check_one_per_example, gather_rows
from fedpa.objectives.prior import NormalPrior, Prior
from fedpa.types import Params

NEEDS_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


def check_loss(objective: Objective, theta: Params, examples: Any) -> None:
    """Refuse a loss that does not return one number per example. Nothing is computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))

    def batch_of(size: int) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), examples)

    try:
        value = trace("loss", objective.loss, theta, batch_of(2), key)
    except KeyError as error:
        has = [
            f"{name} has {', '.join(map(repr, tree))}"
            for name, tree in (("the batch", examples), ("params", theta))
            if isinstance(tree, Mapping)
        ]
        raise FedpaError(f"loss: no {error}{_where(error)}: {'; '.join(has)}") from error
    for size in (2, 3):
        batch = batch_of(size)
        check_one_per_example(jax.eval_shape(objective.loss, theta, batch, key), size)
        if objective.sparse is not None:
            rows = jax.eval_shape(functools.partial(gather_rows, objective.sparse), theta, batch)
            check_one_per_example(jax.eval_shape(objective.sparse.loss, rows, batch, key), size)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise FedpaError(
            f"loss returns {value.dtype} numbers: they must be floating-point to have gradients"
        )
    if objective.reduction not in ("mean", "sum"):
        raise FedpaError(f"reduction = {objective.reduction!r}: must be 'mean' or 'sum'")
    if objective.weight is not None:
        expected = "for a batch of 2: it must return one number per example"
        _check_shape("weight", trace("weight", objective.weight, batch_of(2)), (2,), expected)
    if objective.regularizer is not None:
        penalty = trace("regularizer", objective.regularizer, theta)
        _check_shape("regularizer", penalty, (), "for the parameters: it must return one number")
    if objective.prior is not None:
        _check_prior(objective.prior, objective.num_examples, theta)


def _check_prior(prior: Any, num_examples: Any, theta: Params) -> None:
    """Refuse what is no prior of parameters like θ, and no number of examples."""
    if num_examples is not None and not (np.shape(num_examples) == () and num_examples > 0):
        raise refuse("num_examples", num_examples, "must be the examples of all clients, > 0")
    if not isinstance(prior, Prior) or isinstance(prior, type):
        raise refuse("prior", prior, "must be a prior, for example fedpa.normal_prior(sd=2.0)")
    if isinstance(prior, NormalPrior):
        prior.check(theta)
    density = trace("prior.log_density", prior.log_density, theta)
    _check_shape("prior.log_density", density, (), "for the parameters: it must return one number")


def _check_shape(name: str, value: Any, wanted: tuple[int, ...], expected: str) -> None:
    shape = getattr(value, "shape", type(value).__name__)
    if shape != wanted:
        raise FedpaError(f"{name} returns shape {shape} {expected}, shape {wanted}")


def check_like(field: str, tree: Any, theta0: Params) -> None:
    """Refuse what has another structure than θ₀, or arrays of other shapes."""
    structures: list[Any] = [jax.tree.structure(one) for one in (tree, theta0)]
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(one)] for one in (tree, theta0)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise FedpaError(
            f"{field} has arrays of shapes {shapes[0]}: must have the structure of θ₀, {shapes[1]}"
        )


def trace(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes of what the function returns. It is traced twice; nothing is computed."""
    try:
        # In a function of its own each time: JAX remembers what it has traced.
        first, shapes = jax.make_jaxpr(lambda *a: function(*a), return_shape=True)(*arguments)
        second = jax.make_jaxpr(lambda *a: function(*a))(*arguments)
    except NEEDS_NUMBERS as error:
        raise FedpaError(
            f"{name} can't be compiled: it needs the values of arrays{_where(error)}; use "
            "jax.numpy and jax.lax (jnp.where, lax.cond) in place of float(), numpy and if"
        ) from None
    except jax.errors.UnexpectedTracerError as error:
        raise FedpaError(
            f"{name} can't be compiled: it uses an array that an earlier call stored outside of it"
            f"{_where(error)} (in a list, a global or an attribute); compiled functions can't"
        ) from None
    if str(first.jaxpr) != str(second.jaxpr) or not _same(first.consts, second.consts):
        raise FedpaError(
            f"{name} is another function at every call: it has randomness or a memory of its own "
            "(a counter, a list), which compiling would freeze; draw from the key it is given, and "
            "return what it computes"
        )
    return shapes


def _same(one: Any, other: Any) -> bool:
    def content(constant: Any) -> tuple[Any, ...]:
        array = np.asarray(constant)
        return array.shape, array.dtype, array.tobytes()

    return len(one) == len(other) and all(
        a is b or content(a) == content(b) for a, b in zip(one, other, strict=True)
    )


def _where(error: BaseException) -> str:
    """The deepest line of the error that is not of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(__file__).parent.parent
    for frame in reversed(frames):
        path = Path(frame.filename)
        if "site-packages" not in path.parts and own not in path.parents:
            return f" ({path.name}, line {frame.lineno}: {frame.line})"
    return ""
