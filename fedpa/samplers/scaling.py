"""Whether an optimizer only multiplies gradients by numbers, as SGD without momentum does.

The answer is read off the program that the optimizer's update is, followed from its inputs: what
is not understood counts as something else than a multiplication.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from fedpa.types import Params


class Multiple(NamedTuple):
    """`factor` times the gradient with respect to one leaf; the number itself if there is none."""

    leaf: int | None
    factor: jax.Array


Value = Multiple | None
"""None: anything else."""


def scaling(optimizer: optax.GradientTransformation, theta: Params) -> Params | None:
    """The numbers s, one for each leaf of θ, with update(g) = s g whatever g is, if there are any.

    An optimizer that carries numbers from step to step (momentum, a count of steps) has none.
    """
    state = jax.eval_shape(optimizer.init, theta)
    if jax.tree.leaves(state):
        return None
    program, out = jax.make_jaxpr(
        lambda gradient, theta: optimizer.update(gradient, state, theta)[0], return_shape=True
    )(theta, theta)
    if jax.tree.structure(out) != jax.tree.structure(theta):  # type: ignore[operator]
        return None
    leaves, structure = jax.tree.flatten(theta)
    one = [Multiple(i, jnp.ones((), leaf.dtype)) for i, leaf in enumerate(leaves)]
    updates = _follow(program, [*one, *[None] * len(leaves)])
    factors = [u.factor for i, u in enumerate(updates) if u is not None and u.leaf == i]
    return jax.tree.unflatten(structure, factors) if len(factors) == len(leaves) else None


def _follow(program: core.ClosedJaxpr, inputs: list[Value]) -> list[Value]:
    known: dict[Any, Value] = dict(zip(program.jaxpr.invars, inputs, strict=True))
    known |= {
        var: _number(const)
        for var, const in zip(program.jaxpr.constvars, program.consts, strict=True)
    }

    def read(atom: Any) -> Value:
        return _number(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for equation in program.jaxpr.eqns:
        values = _apply(equation, [read(atom) for atom in equation.invars])
        known |= dict(zip(equation.outvars, values, strict=True))
    return [read(atom) for atom in program.jaxpr.outvars]


def _number(value: Any) -> Value:
    return Multiple(None, jnp.asarray(value)) if jnp.shape(value) == () else None


def _apply(equation: core.JaxprEqn, inputs: list[Value]) -> list[Value]:
    """What one operation makes of its inputs."""
    unknown: list[Value] = [None] * len(equation.outvars)
    if any(value is None for value in inputs):
        return unknown
    known = [value for value in inputs if value is not None]
    match equation.primitive.name, known:
        case "jit" | "pjit", _:
            return _follow(equation.params["jaxpr"], inputs)
        case "mul", [a, b] if a.leaf is None or b.leaf is None:
            return [Multiple(b.leaf if a.leaf is None else a.leaf, jax.lax.mul(a.factor, b.factor))]
        case "div", [a, b] if b.leaf is None:
            return [Multiple(a.leaf, jax.lax.div(a.factor, b.factor))]
        case "neg", [a]:
            return [Multiple(a.leaf, -a.factor)]
        case "broadcast_in_dim", [a] if a.leaf is None:
            return [a]
        case "convert_element_type", [a] if a.leaf is None:
            return [Multiple(None, a.factor.astype(equation.params["new_dtype"]))]
    return unknown
