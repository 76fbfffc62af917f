"""The weighted mean of clipped results (Karimireddy et al. 2021, with the center 0)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fedpa.errors import check_positive
from fedpa.precision import widen
from fedpa.server.aggregation import Aggregate, Aggregation, Result, Weight, weighted_mean
from fedpa.server.keep_results import row_norms


def clipped_mean(bound: float) -> Aggregation:
    """Average results after shortening each to a norm of at most τ.

    Σ q_i Δ_i min(1, τ/‖Δ_i‖) / Σ q_i: centered clipping around 0 (Karimireddy, He, Jaggi: Learning
    from history for Byzantine robust optimization, ICML 2021, eq. 7 with v = 0).

    A running sum, with the memory of one result. A malicious share δ of the weights moves the mean
    by at most δ(τ + the honest mean's norm). Weights count: with `weighting="examples"` δ is the
    share of the examples they claim. The norm is that of all arrays that a client sends, as one
    vector.

    It bounds what one client can do, but noise is not calibrated to it: for differential privacy
    use `fedpa.private`, which clips by itself and refuses this aggregation.

    Args:
        bound: τ > 0; honest updates should rarely be longer (`train/delta_norm` in records).
    Returns:
        The aggregation.
    Raises:
        FedpaError: τ is out of range.
    Example:
        >>> import fedpa, jax.numpy as jnp
        >>> clipped, results = clipped_mean(1.0), jnp.asarray([[0.5], [-1e30]])
        >>> total, _ = fedpa.server.add_all(clipped, results, jnp.ones(2))
        >>> float(clipped.value(total).mean[0])
        -0.25
    """
    check_positive("bound", bound)
    mean = weighted_mean()

    def add(total: Aggregate, result: Result, weight: Weight) -> tuple[Aggregate, Bool[Array, ""]]:
        wide = widen(result)
        norm = row_norms(jax.tree.map(lambda x: x[None], wide))[0]
        factor = bound / jnp.maximum(norm, bound)
        return mean.add(total, jax.tree.map(lambda x: factor.astype(x.dtype) * x, wide), weight)

    def value(total: Aggregate) -> Aggregate:
        # Not the mean's own, so that `is_mean` says no: it is no mean of what clients sent.
        return mean.value(total)

    return Aggregation(mean.init, add, mean.merge, value)
