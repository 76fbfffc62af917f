"""Local SGD on a table of which a mini-batch reads a few rows: the others are left untouched.

Let E be the table, r_1 … r_m the rows that a batch reads, and f̂ = ℓ(E[r_1], …, E[r_m], φ) with φ
the other parameters. By the chain rule row r of ∂f̂/∂E is the sum of ∂ℓ/∂E[r_i] over all i with
r_i = r, and 0 for rows not read. So if ClientOpt is a multiplication by −η,

    E[r_i] ← E[r_i] − η ∂ℓ/∂E[r_i],   i = 1 … m, one after the other,

is its step exactly, repeated rows included, in time that depends on m and not on the table's size.
(Momentum, weight decay, clipping or Adam move or weigh rows that were not read: no such step. Plain
SGD is said by a number in ClientOpt's place, `fedpa.LocalTraining(0.1, …)`.)

The average of a window's iterates is kept in the same way. With θ_k = θ_0 + u_1 + … + u_k,

    1/K Σ_k θ_k = θ_K − 1/K Σ_k (k − 1) u_k,

a sum of multiples of the updates, each as sparse as its update.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.objective import (
    Objective,
    SparseTable,
    gather_rows,
    has_penalty,
    minibatch_loss,
    replace_table,
)
from fedpa.precision import accumulation_dtype
from fedpa.samplers.iasg import LOSS, Average, ChainState, fold_key
from fedpa.types import Count, Examples, Params, Scalar


def average_sparsely(
    objective: Objective, rate: Any, average: bool, theta: Params
) -> Average | None:
    """Plain SGD at this rate on a table, for parameters like θ; None if steps must be dense.

    Parameters in less than float32 stay dense: adding one by one would round each time.
    """
    sparse = objective.sparse
    # A regularizer or a prior pulls at every row.
    if sparse is None or has_penalty(objective):
        return None
    if any(accumulation_dtype(leaf.dtype) != leaf.dtype for leaf in jax.tree.leaves(theta)):
        return None
    of_rows = objective._replace(loss=sparse.loss)

    def init(theta: Params) -> Any:
        return jax.tree.map(jnp.zeros_like, theta) if average else ()

    def step(
        state: ChainState, lag: Any, k: Count, batch: Minibatch, n: Count
    ) -> tuple[ChainState, Any, Scalar]:
        """`lag` is Σ_k (k − 1) u_k."""
        rows = gather_rows(sparse, state.theta, batch.examples)
        loss, gradient = jax.value_and_grad(minibatch_loss, argnums=1)(
            of_rows, rows, batch, fold_key(state, LOSS)
        )
        updates = jax.tree.map(lambda g: jnp.asarray(-rate, g.dtype) * g, gradient)
        theta = _add(sparse, state.theta, updates, batch.examples)
        if average:
            weighted = jax.tree.map(lambda u: (k - 1).astype(u.dtype) * u, updates)
            lag = _add(sparse, lag, weighted, batch.examples)
        return state._replace(theta=theta), lag, loss

    def value(theta: Params, lag: Any, k: Count) -> Params:
        if not average:
            return theta
        steps = jnp.maximum(k, 1)
        return jax.tree.map(lambda x, s: x - s / steps.astype(s.dtype), theta, lag)

    return Average(init, step, value)


def _add(sparse: SparseTable, theta: Params, updates: Params, batch: Examples) -> Params:
    """Add updates that have rows in the table's place."""
    rows = sparse.table(updates)
    table = sparse.table(theta).at[sparse.rows(batch)].add(rows)
    # The table's own place is filled in last: meanwhile it holds rows, as the updates do.
    others = jax.tree.map(jnp.add, replace_table(sparse, theta, rows), updates)
    return replace_table(sparse, others, table)
