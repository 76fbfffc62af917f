"""FedPA's delta (Theorem 3): Δ̂ = Σ̂⁻¹(θ₀ − x̄) from ℓ posterior samples.

O(ℓ²d) time and O(ℓd) memory; inner products run over all parameters jointly. Two forms of the
same numbers:

- `gram`: samples are stored as they come and Δ̂ is solved for when it is read. One large
  matrix product, which hardware likes, and ρ may be chosen from the samples (OAS, RBLW).
- `recurrence`: the paper's dynamic program. Every sample costs O(td) at once and reading O(d), so
  it wins where Δ̂ is read after every sample.

`auto`, the default, takes the recurrence for up to three samples with a fixed ρ and the Gram form
otherwise; docs/architecture.md has the measurements behind it.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from fedpa.deltas import gram, recurrence
from fedpa.deltas.delta import Delta, DeltaInfo
from fedpa.deltas.recurrence import RecurrenceState
from fedpa.deltas.shrinkage import Shrinkage, shrinkage
from fedpa.errors import FedpaError, check_integer, refuse
from fedpa.precision import accumulation_dtype
from fedpa.samplers.temperature import Temperature, relative_temperature
from fedpa.types import Count, Params, Scalar

Form = Literal["auto", "gram", "recurrence"]
RECURRENCE_UP_TO = 3
"""Samples up to which the recurrence is the faster form, by measurement."""
SampleScale = str | float
"""`auto`, `none`, `sqrt-n` or a number."""


class GramState(NamedTuple):
    theta0: Params
    rows: Float[Array, "l d"]
    """The samples so far, ravelled, in at least float32; zero where not yet written."""
    t: Scalar
    """Samples so far."""
    scale: Scalar


def posterior(
    num_samples: int,
    shrink: Shrinkage,
    *,
    sample_scale: SampleScale = "none",
    temperature: Temperature | None = None,
    form: str = "auto",
) -> Delta:
    """Build the delta for at most `num_samples` samples.

    sample_scale: multiplies the samples' deviations from their mean before the covariance is taken:
        `none` (the paper), `sqrt-n` (√n_i, from the posterior's scale A⁻¹/n towards the A⁻¹ that
        FedPA needs), a number, or `auto`: √(n_i/T), `none` for samples without a temperature.
    temperature: T of the posterior that was sampled, for `auto`.
    """
    check_integer("num_samples", num_samples, 1)
    check_sample_scale(sample_scale)
    if form not in ("auto", "gram", "recurrence"):
        raise refuse("form", form, "must be 'auto', 'gram' or 'recurrence'")
    committed = shrink.rule == "fixed" and shrink.target == "identity"
    if form == "auto":
        form = "recurrence" if committed and num_samples <= RECURRENCE_UP_TO else "gram"
    if form == "recurrence" and not committed:
        raise refuse(
            "form",
            form,
            "commits to ρ before the samples: it takes a fixed ρ and the identity target",
        )

    def scale_of(n: Count, dtype: Any) -> Scalar:
        if sample_scale == "auto" and temperature is not None:
            return jax.lax.rsqrt(relative_temperature(temperature, n)).astype(dtype)
        if sample_scale in ("auto", "none"):
            return jnp.ones((), dtype)
        if sample_scale == "sqrt-n":
            return jnp.sqrt(n.astype(dtype))
        return jnp.asarray(sample_scale, dtype)

    def init_gram(theta0: Params, n: Count) -> GramState:
        flat = _ravelled(theta0)
        rows = jnp.zeros((num_samples, flat.shape[0]), flat.dtype)
        return GramState(theta0, rows, jnp.zeros((), flat.dtype), scale_of(n, flat.dtype))

    def update_gram(state: GramState, theta_s: Params, theta_k: Params) -> GramState:
        rows = state.rows.at[state.t.astype(jnp.int32)].set(_ravelled(theta_s))
        return state._replace(rows=rows, t=state.t + 1)

    def value_gram(state: GramState) -> tuple[Params, DeltaInfo]:
        flat = _ravelled(state.theta0)
        found = gram.solve(flat, state.rows, shrink, state.scale, state.t)
        return _shaped(found.delta, state.t, state.theta0), _info(found.rho, found.ess)

    def init_recurrence(theta0: Params, n: Count) -> tuple[Params, RecurrenceState]:
        flat = _ravelled(theta0)
        scale = scale_of(n, flat.dtype)
        return theta0, recurrence.init(flat, num_samples, shrink.rho, scale)

    def update_recurrence(
        state: tuple[Params, RecurrenceState], theta_s: Params, theta_k: Params
    ) -> tuple[Params, RecurrenceState]:
        theta0, inner = state
        return theta0, recurrence.update(inner, _ravelled(theta_s))

    def value_recurrence(state: tuple[Params, RecurrenceState]) -> tuple[Params, DeltaInfo]:
        theta0, inner = state
        delta = _shaped(recurrence.value(inner), inner.t, theta0)
        return delta, _info(inner.rho, gram.effective_samples(inner.t, inner.steps, inner.spread))

    def _shaped(delta: Array, t: Scalar, theta0: Params) -> Params:
        # More samples than there is room for: no number rather than a wrong one.
        delta = jnp.where(t <= num_samples, delta, jnp.nan)
        flat, unravel = ravel_pytree(theta0)
        return unravel(delta.astype(flat.dtype))

    if form == "gram":
        return Delta(init_gram, update_gram, value_gram)
    return Delta(init_recurrence, update_recurrence, value_recurrence)


def posterior_delta(
    theta0: Any,
    samples: Any,
    rho: Any,
    *,
    target: str = "identity",
    sample_scale: str | float = 1.0,
) -> Any:
    """Δ̂ = Σ̂⁻¹(θ₀ − x̄), eq. 4 by Theorem 3.

    theta0: an array or a pytree of arrays.
    samples: the same structure, every array with the ℓ samples stacked on a new axis 0.
    rho: the paper's ρ ≥ 0, or 'oas' or 'rblw' to choose it from the samples.
    target: 'identity' (the paper's) or 'scaled', see `fedpa.deltas.shrinkage`.
    sample_scale: multiplies the samples' deviations from their mean.

    Returns Δ̂ in θ₀'s structure, dtypes and kind (NumPy or JAX). Works inside `jax.jit` too;
    outside, it runs on the host with sums in float64.
    """
    shrink = shrinkage(rho, target)
    if isinstance(sample_scale, str):
        raise refuse("sample_scale", sample_scale, "must be a number ≥ 0 (√n_i for 'sqrt-n')")
    check_sample_scale(sample_scale)
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
        flat, unravel = ravel_pytree(theta0)
        rows = jax.vmap(_ravelled)(samples).astype(dtype)
        scale = jnp.asarray(sample_scale, dtype)
        return unravel(gram.solve(flat.astype(dtype), rows, shrink, scale).delta.astype(flat.dtype))

    if ell * sum(leaf.size for leaf in leaves) <= 1 << 20:  # wider costs nothing to speak of
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

    return _unravelled(values, leaves, structure)


def _info(rho: Any, ess: Any) -> DeltaInfo:
    return DeltaInfo(jnp.asarray(rho, jnp.float32), jnp.asarray(ess, jnp.float32))


def _ravelled(tree: Params) -> Float[Array, " d"]:
    """One vector, wide enough for the algebra."""
    flat, _ = ravel_pytree(tree)
    return flat.astype(accumulation_dtype(flat.dtype))


def check_sample_scale(sample_scale: SampleScale) -> None:
    if isinstance(sample_scale, str):
        if sample_scale not in ("auto", "none", "sqrt-n"):
            expected = "must be 'auto', 'none', 'sqrt-n' or a number ≥ 0"
            raise refuse("sample_scale", sample_scale, expected)
    elif not (np.isfinite(sample_scale) and sample_scale >= 0):
        raise refuse("sample_scale", sample_scale, "must be a finite number ≥ 0")


def _num_samples(leaves: list[Any], stacked: list[Any]) -> int:
    for leaf, samples in zip(leaves, stacked, strict=True):
        for name, array in [("theta0", leaf), ("samples", samples)]:
            is_array = isinstance(array, jax.Array | np.ndarray | np.generic)
            kind = array.dtype if is_array else type(array).__name__
            if not is_array or not jnp.issubdtype(kind, jnp.floating):
                raise FedpaError(f"{name} has a leaf of type {kind}: must be floating-point arrays")
    counts = {samples.shape[0] if samples.ndim else 0 for samples in stacked}
    if len(counts) != 1 or counts == {0}:
        shapes = [samples.shape for samples in stacked]
        raise FedpaError(
            f"samples have shapes {shapes}: stack the same ℓ ≥ 1 samples on axis 0 of each array"
        )
    for leaf, samples in zip(leaves, stacked, strict=True):
        if samples.shape[1:] != leaf.shape:
            raise FedpaError(
                f"samples have an array of shape {samples.shape}: must be (ℓ, *{leaf.shape}), "
                "one θ per entry of axis 0"
            )
    return int(counts.pop())


def _unravelled(values: np.ndarray, leaves: list[Any], structure: Any) -> Any:
    """The vector in the shapes, dtypes and kinds (NumPy or JAX) of the leaves."""
    pieces = np.split(values, np.cumsum([leaf.size for leaf in leaves])[:-1])
    return jax.tree.unflatten(
        structure, [_like(piece, leaf) for piece, leaf in zip(pieces, leaves, strict=True)]
    )


def _like(values: np.ndarray, leaf: Any) -> Any:
    shaped = values.reshape(leaf.shape).astype(leaf.dtype)
    if isinstance(leaf, np.ndarray | np.generic):
        return shaped
    with jax.enable_x64(leaf.dtype == np.float64):
        return jnp.asarray(shaped)
