"""FedPA's delta (Theorem 3): Δ̂ = Σ̂⁻¹(θ₀ − x̄) from ℓ posterior samples, as they come.

O(ℓ²d) time and O(ℓd) memory; inner products run over all parameters jointly. Two forms of the
same numbers:

- `gram`: samples are stored and Δ̂ is computed when it is read, by one large matrix product; ρ may
  be estimated from the samples (OAS, RBLW).
- `recurrence`: the paper's dynamic program. Every sample costs O(td) at once and reading O(d), so
  it wins where Δ̂ is read after every sample.

`auto`, the default, takes the recurrence for up to three samples with a fixed ρ and the Gram form
otherwise; docs/performance.md has the measurements behind it.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fedpa.deltas import gram
from fedpa.deltas.delta import Delta, DeltaInfo, ravel, unravel
from fedpa.deltas.recurrence import recurrence
from fedpa.deltas.shrinkage import Shrinkage
from fedpa.errors import check_integer, refuse
from fedpa.samplers.sampler import Temperature, relative_temperature
from fedpa.types import Count, Params, Scalar

RECURRENCE_UP_TO = 3
"""Samples up to which the recurrence is the faster form, by measurement."""
SampleScale = Literal["auto", "none", "sqrt-n"] | float
"""What multiplies the samples' deviations from their mean."""
Form = Literal["auto", "gram", "recurrence"]
"""How Δ̂ is computed."""


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
    form: Form = "auto",
) -> Delta:
    """Build FedPA's delta Δ̂ = Σ̂⁻¹(θ₀ − x̄) from ℓ posterior samples (eq. 4, Theorem 3).

    Args:
        num_samples: ℓ ≥ 1, at most; with more samples Δ̂ is NaN.
        shrink: How Σ̂ is shrunk, from `fixed`, `oas` or `rblw`.
        sample_scale: Multiplies the samples' deviations from their mean before the covariance is
            taken: "none" (the paper, the default), "sqrt-n" (√n_i, from the posterior's scale A⁻¹/n
            to the A⁻¹ that FedPA needs), a number ≥ 0, or "auto": √(n_i/T), 1 without a
            temperature.
        temperature: T of the posterior that was sampled, for "auto"; default: none.
        form: "gram", "recurrence" (needs a fixed ρ and the identity target) or "auto", the default.
    Returns:
        The delta; its info has the ρ in use and the effective sample size.
    Raises:
        FedpaError: A setting is not one of these, or the form does not fit the shrinkage.
    Example:
        >>> delta = posterior(3, fedpa.deltas.fixed(0.1))
        >>> state = delta.init(jnp.ones(2), jnp.asarray(10))
        >>> for x in (-1.0, 0.0, 1.0):
        ...     state = delta.update(state, jnp.array([x, 0.0]), jnp.zeros(2))
        >>> print(delta.value(state)[0].round(3))
        [1.  1.2]
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
            "form", form, "commits to ρ before the samples: needs a fixed ρ, the identity target"
        )

    def scale_of(n: Count, dtype: Any) -> Scalar:
        if sample_scale == "auto" and temperature is not None:
            return jax.lax.rsqrt(relative_temperature(temperature, n)).astype(dtype)
        if sample_scale == "sqrt-n":
            return jnp.sqrt(n.astype(dtype))
        return jnp.asarray(1 if sample_scale in ("auto", "none") else sample_scale, dtype)

    if form == "recurrence":
        return recurrence(num_samples, shrink.rho, scale_of)

    def init(theta0: Params, n: Count) -> GramState:
        flat = ravel(theta0)
        rows = jnp.zeros((num_samples, flat.shape[0]), flat.dtype)
        return GramState(theta0, rows, jnp.zeros((), flat.dtype), scale_of(n, flat.dtype))

    def update(state: GramState, theta_s: Params, theta_k: Params) -> GramState:
        rows = state.rows.at[state.t.astype(jnp.int32)].set(ravel(theta_s), mode="clip")
        return state._replace(rows=rows, t=state.t + 1)

    def value(state: GramState) -> tuple[Params, DeltaInfo]:
        delta, rho, ess = gram.solve(ravel(state.theta0), state.rows, shrink, state.scale, state.t)
        # More samples than allowed: NaN rather than a wrong number.
        info = DeltaInfo(rho.astype(jnp.float32), ess.astype(jnp.float32))
        return unravel(delta, state.theta0, state.t <= num_samples), info

    return Delta(init, update, value)


def check_sample_scale(sample_scale: SampleScale) -> None:
    if isinstance(sample_scale, str):
        if sample_scale not in ("auto", "none", "sqrt-n"):
            expected = "must be 'auto', 'none', 'sqrt-n' or a number ≥ 0"
            raise refuse("sample_scale", sample_scale, expected)
    elif not (np.isfinite(sample_scale) and sample_scale >= 0):
        raise refuse("sample_scale", sample_scale, "must be a finite number ≥ 0")
