"""Local SGD on a table of which a mini-batch reads a few rows: the others are left untouched.

Let E be the table, r_1 … r_m the rows that a batch reads, and f̂ = ℓ(E[r_1], …, E[r_m], φ) with φ
the other parameters. By the chain rule row r of ∂f̂/∂E is the sum of ∂ℓ/∂E[r_i] over all i with
r_i = r, and 0 for rows not read. So if ClientOpt is a multiplication by −η,

    E[r_i] ← E[r_i] − η ∂ℓ/∂E[r_i],   i = 1 … m, one after the other,

is its step exactly, repeated rows included, in time that depends on m and not on the table's size.
(Momentum, weight decay, clipping or Adam move or weigh rows that were not read: no such step.)

The average of a window's iterates is kept in the same way. With θ_k = θ_0 + u_1 + … + u_k,

    1/K Σ_k θ_k = θ_K − 1/K Σ_k (k − 1) u_k,

a sum of multiples of the updates, each as sparse as its update.
"""

import jax
import jax.numpy as jnp
import optax

from fedpa.objectives.minibatches import Minibatch
from fedpa.objectives.objective import Objective, minibatch_loss
from fedpa.objectives.sparse_table import SparseTable, gathered, replaced
from fedpa.precision import accumulation_dtype
from fedpa.samplers.minibatch_chain import Kept, Memory, StepKeys, Walk
from fedpa.samplers.scaling import scaling
from fedpa.types import Count, Examples, Params, Scalar


def sparse_walk(
    objective: Objective, optimizer: optax.GradientTransformation, average: bool, theta: Params
) -> Walk | None:
    """The walk that local SGD with this optimizer makes, for parameters like θ; None if dense.

    Parameters in less than float32 stay dense: adding one by one would round each time.
    """
    sparse = objective.sparse
    # A regularizer pulls at every row.
    if sparse is None or objective.regularizer is not None:
        return None
    if any(accumulation_dtype(leaf.dtype) != leaf.dtype for leaf in jax.tree.leaves(theta)):
        return None
    factors = scaling(optimizer, theta)
    return None if factors is None else _walk(objective, sparse, factors, average)


def _walk(objective: Objective, sparse: SparseTable, factors: Params, average: bool) -> Walk:
    of_rows = objective._replace(loss=sparse.loss)

    def start(theta: Params) -> Kept:
        return jax.tree.map(jnp.zeros_like, theta) if average else ()

    def move(
        theta: Params,
        memory: Memory,
        lag: Kept,
        k: Count,
        batch: Minibatch,
        n: Count,
        keys: StepKeys,
    ) -> tuple[Params, Memory, Kept, Scalar]:
        """`lag` is Σ_k (k − 1) u_k."""
        loss, gradient = jax.value_and_grad(minibatch_loss, argnums=1)(
            of_rows, gathered(sparse, theta, batch.examples), batch, keys.loss
        )
        updates = jax.tree.map(lambda s, g: s * g, factors, gradient)
        theta = _add(sparse, theta, updates, batch.examples)
        if average:
            weighted = jax.tree.map(lambda u: (k - 1).astype(u.dtype) * u, updates)
            lag = _add(sparse, lag, weighted, batch.examples)
        return theta, memory, lag, loss

    def sample(theta: Params, lag: Kept, k: Count) -> Params:
        if not average:
            return theta
        steps = jnp.maximum(k, 1)
        return jax.tree.map(lambda x, s: x - s / steps.astype(s.dtype), theta, lag)

    return Walk(start, move, sample)


def _add(sparse: SparseTable, theta: Params, updates: Params, batch: Examples) -> Params:
    """Add updates that have rows in the table's place."""
    rows = sparse.table(updates)
    table = sparse.table(theta).at[sparse.rows(batch)].add(rows)
    # The table's own place is filled in last: meanwhile it holds rows, as the updates do.
    others = jax.tree.map(jnp.add, replaced(sparse, theta, rows), updates)
    return replaced(sparse, others, table)
