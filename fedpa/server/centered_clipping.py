"""Centered clipping (Karimireddy et al. 2021)."""

import jax
import jax.numpy as jnp

from fedpa.errors import check_integer, check_positive
from fedpa.server.aggregation import Aggregation, Result
from fedpa.server.keep_results import Present, Rows, distances, keep_results, median_of
from fedpa.server.median import coordinate_median


def centered_clipping(bound: float | None = None, *, passes: int = 3) -> Aggregation:
    """Average results after shortening their distances to a center.

    v ← v + 1/n Σ_i (Δ_i − v) min(1, τ/‖Δ_i − v‖), `passes` times (Karimireddy, He, Jaggi: Learning
    from history for Byzantine robust optimization, ICML 2021, eq. 7).

    There the first v is the aggregate of the last round. An aggregation here knows one round, so v
    starts at the median of every coordinate, and the passes need all results of the round
    (`keep_results`). The running sum with the center 0 is `clipped_mean`.

    Withstands any minority of malicious clients; the fewer, the closer to the honest mean. The
    norm is that of all arrays that a client sends, as one vector. It ignores weights.

    Args:
        bound: τ > 0; default: the median of ‖Δ_i − v‖, in every pass.
        passes: How often v is moved, ≥ 1; default: 3.
    Returns:
        The aggregation.
    Raises:
        FedpaError: A setting is out of range.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=centered_clipping())
    """
    if bound is not None:
        check_positive("bound", bound)
    check_integer("passes", passes, 1)

    def combine(rows: Rows, present: Present) -> Result:
        def step(_: int, v: Result) -> Result:
            away = distances(rows, v)
            tau = median_of(away, present) if bound is None else jnp.asarray(bound, away.dtype)
            factors = jnp.where(away > tau, tau / jnp.where(away > tau, away, 1), 1)
            shares = jnp.where(present, factors, 0) / jnp.sum(present).astype(away.dtype)
            return jax.tree.map(
                lambda c, x: c + jnp.tensordot(shares.astype(x.dtype), x - c[None], axes=1), v, rows
            )

        found: Result = jax.lax.fori_loop(0, passes, step, coordinate_median(rows, present))
        return found

    return keep_results(combine)
