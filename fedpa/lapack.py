"""LAPACK's factorizations, vectorized as one matrix after the other.

LAPACK calls on a batch, in compiled programs that run in two threads at a time, wait for each other
for ever (jaxlib 0.10.2; `solve`, `qr`, `eigh`, Cholesky alike); calls on one matrix don't. What is
`one_by_one` has derivatives in forward mode only.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

F = TypeVar("F", bound=Callable[..., Any])

one_by_one: Callable[[F], F] = jax.custom_batching.sequential_vmap
"""The function under `jax.vmap`: a loop over the batch, in which each call has one matrix."""


@one_by_one
def cholesky(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """L of LLᵀ = the matrix; not-a-number where it is not positive definite."""
    factor: Array = jnp.linalg.cholesky(matrix)
    return factor


def _solve_by_triangle(transpose: bool) -> Callable[[Array, Array], Array]:
    """One triangle after the other; of one triangle, all right-hand sides at once."""

    @jax.custom_batching.custom_vmap
    def solve(lower: Float[Array, "d d"], columns: Float[Array, "d c"]) -> Float[Array, "d c"]:
        return jax.lax.linalg.triangular_solve(
            lower, columns, left_side=True, lower=True, transpose_a=transpose
        )

    @solve.def_vmap
    def rule(size: int, batched: Sequence[bool], lower: Array, columns: Array) -> Any:
        if not batched[0]:
            wide = columns.swapaxes(0, 1).reshape(len(lower), -1)
            return solve(lower, wide).reshape(len(lower), size, -1).swapaxes(0, 1), True
        if batched[1]:
            return jax.lax.map(lambda both: solve(*both), (lower, columns)), True
        return jax.lax.map(lambda one: solve(one, columns), lower), True

    function: Callable[[Array, Array], Array] = solve
    return function


solve_lower = _solve_by_triangle(transpose=False)
"""L⁻¹ times the columns, of L and the columns."""
solve_upper = _solve_by_triangle(transpose=True)
"""L⁻ᵀ times the columns, of L and the columns."""


@one_by_one
def qr(matrix: Float[Array, "d r"]) -> tuple[Float[Array, "d k"], Float[Array, "k r"]]:
    """Q of orthonormal columns, k = min(d, r), and R of QR = the matrix."""
    q, r = jnp.linalg.qr(matrix)
    return q, r


@one_by_one
def svd(
    matrix: Float[Array, "d r"],
) -> tuple[Float[Array, "d k"], Float[Array, " k"], Float[Array, "k r"]]:
    """U, σ and Vᵀ of U diag(σ) Vᵀ = the matrix, k = min(d, r)."""
    u, sigma, vt = jnp.linalg.svd(matrix, full_matrices=False)
    return u, sigma, vt


@one_by_one
def eigh(matrix: Float[Array, "d d"]) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    """Eigenvalues, and eigenvectors as columns, of a symmetric matrix."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors
