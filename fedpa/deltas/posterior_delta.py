"""Δ̂ as a function of arrays, without a client around it (eq. 4)."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fedpa.deltas import gram
from fedpa.deltas.delta import ravel, unravel
from fedpa.deltas.shrinkage import Rho, Target, shrinkage
from fedpa.errors import FedpaError, check_number
from fedpa.precision import accumulation_dtype

Tree = TypeVar("Tree")


def posterior_delta(
    theta0: Tree,
    samples: PyTree[Array | np.ndarray],
    rho: Rho,
    *,
    target: Target = "identity",
    sample_scale: float = 1.0,
) -> Tree:
    """Compute FedPA's client update Δ̂ = Σ̂⁻¹(θ₀ − x̄) from posterior samples (eq. 4, Theorem 3).

    Runs in O(ℓ²d) time and O(ℓd) memory; no d×d matrix is formed. Works inside `jax.jit` too;
    outside, it runs on the host with sums in float64.

    Args:
        theta0: θ₀, an array or a pytree of arrays.
        samples: Same structure, every array with the ℓ ≥ 1 samples stacked on a new axis 0.
        rho: Shrinkage ρ ≥ 0, or "oas" or "rblw" to choose it from the samples.
        target: "identity" (the paper's, the default) or "scaled", see `fedpa.deltas.oas`.
        sample_scale: Multiplies the samples' deviations from their mean, ≥ 0; default: 1.
    Returns:
        Δ̂ in θ₀'s structure, dtypes and kind (NumPy or JAX).
    Raises:
        FedpaError: Structures or shapes don't fit, or a value is not finite.
    Example:
        >>> posterior_delta(np.ones(3), np.zeros((5, 3)), rho=0.1)
        array([1.4, 1.4, 1.4])
    """
    shrink = shrinkage(rho, target)
    check_number("sample_scale", sample_scale)
    leaves, structure = jax.tree.flatten(theta0)
    stacked, sampled_structure = jax.tree.flatten(samples)
    if sampled_structure != structure:  # type: ignore[operator]
        raise FedpaError(
            f"samples have structure {sampled_structure}: must be θ₀'s structure, {structure}"
        )
    if not leaves or not any(np.size(leaf) for leaf in leaves):
        raise FedpaError("theta0 has no arrays: give at least one floating-point array")
    ell = _num_samples(leaves, stacked)
    dtype = accumulation_dtype(np.result_type(*[leaf.dtype for leaf in [*leaves, *stacked]]))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in [*leaves, *stacked]):
        rows, scale = jax.vmap(ravel)(samples).astype(dtype), jnp.asarray(sample_scale, dtype)
        delta = gram.solve(ravel(theta0).astype(dtype), rows, shrink, scale).delta
        found: Tree = unravel(delta, theta0, True)
        return found

    if ell * sum(leaf.size for leaf in leaves) <= 1 << 20:  # float64 costs little here
        dtype = np.dtype(np.float64)
    theta = np.concatenate([np.asarray(leaf, dtype).ravel() for leaf in leaves])
    # A view where possible: the samples may be most of the memory there is.
    parts = [np.asarray(s, dtype).reshape(ell, -1) for s in stacked]
    matrix = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        values = gram.solve(theta, matrix, shrink, sample_scale).delta
    if not np.isfinite(values).all():  # asked first, of every sample, it would take as long again
        for name, array in [("theta0", theta), ("samples", matrix)]:
            if not np.isfinite(array).all():
                raise FedpaError(
                    f"{name} holds a value that is not finite: all must be finite numbers"
                )
    found = _restore(values, leaves, structure)
    return found


def _num_samples(leaves: list[Any], stacked: list[Any]) -> int:
    for leaf, samples in zip(leaves, stacked, strict=True):
        for name, array in [("theta0", leaf), ("samples", samples)]:
            is_array = isinstance(array, jax.Array | np.ndarray | np.generic)
            kind = array.dtype if is_array else type(array).__name__
            if not is_array or not jnp.issubdtype(kind, jnp.floating):
                raise FedpaError(f"{name} has a leaf of type {kind}: must be floating-point arrays")
    counts = {samples.shape[0] if samples.ndim else 0 for samples in stacked}
    shapes = [samples.shape for samples in stacked]
    wanted = [leaf.shape for leaf in leaves]
    if len(counts) != 1 or counts == {0} or [shape[1:] for shape in shapes] != wanted:
        raise FedpaError(
            f"samples have shapes {shapes}: must be (ℓ, *shape) with the same ℓ ≥ 1, one θ per "
            f"entry of axis 0, for the shapes of theta0's arrays, {wanted}"
        )
    return int(counts.pop())


def _restore(values: np.ndarray, leaves: list[Any], structure: Any) -> Any:
    """The vector in the shapes, dtypes and kinds (NumPy or JAX) of the leaves."""

    def shape(piece: np.ndarray, leaf: Any) -> Any:
        array = piece.reshape(leaf.shape).astype(leaf.dtype)
        if isinstance(leaf, np.ndarray | np.generic):
            return array
        with jax.enable_x64(leaf.dtype == np.float64):
            return jnp.asarray(array)

    pieces = np.split(values, np.cumsum([leaf.size for leaf in leaves])[:-1])
    return jax.tree.unflatten(structure, map(shape, pieces, leaves))
