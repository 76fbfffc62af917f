"""The geometric median by smoothed Weiszfeld steps (Pillutla et al. 2022)."""

import jax
import jax.numpy as jnp

from fedpa.errors import check_integer, check_positive
from fedpa.server.aggregation import Aggregation, Result
from fedpa.server.keep_results import (
    Present,
    Rows,
    distances,
    keep_results,
    median_of,
    mix_rows,
)
from fedpa.server.median import coordinate_median


def geometric_median(*, smoothing: float = 1e-6, passes: int = 8) -> Aggregation:
    """Take the point whose distances to all results have the smallest sum.

    argmin_z Σ_i ‖z − Δ_i‖, by Weiszfeld's steps
    z ← Σ β_i Δ_i / Σ β_i,  β_i = 1 / max(ν, ‖z − Δ_i‖)
    (Pillutla, Kakade, Harchaoui: Robust aggregation for federated learning, IEEE Transactions on
    Signal Processing 70, 2022, Algorithm 2). ν is `smoothing` times the median of ‖z − Δ_i‖, and z
    starts at the coordinates' median, both of which a minority can't move far.

    Withstands any minority of malicious clients; the fewer, the closer to the honest clients'. The
    norm is that of all arrays that a client sends, as one vector. It ignores weights and keeps all
    results of a round (`keep_results`).

    Args:
        smoothing: ν > 0 relative to the median distance; default: 1e-6.
        passes: Weiszfeld's steps, ≥ 1; default: 8.
    Returns:
        The aggregation.
    Raises:
        FedpaError: A setting is out of range.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=geometric_median())
    """
    check_positive("smoothing", smoothing)
    check_integer("passes", passes, 1)

    def combine(rows: Rows, present: Present) -> Result:
        def step(_: int, z: Result) -> Result:
            away = distances(rows, z)
            floor = jnp.maximum(smoothing * median_of(away, present), jnp.finfo(away.dtype).tiny)
            shares = jnp.where(present, floor / jnp.maximum(away, floor), 0)
            return mix_rows(shares / jnp.sum(shares), rows)

        found: Result = jax.lax.fori_loop(0, passes, step, coordinate_median(rows, present))
        return found

    return keep_results(combine)
