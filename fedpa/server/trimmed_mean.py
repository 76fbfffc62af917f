"""The trimmed mean of every coordinate (Yin et al. 2018)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpa.errors import refuse
from fedpa.server.aggregation import Aggregation, Result
from fedpa.server.keep_results import Present, Rows, keep_results


def trimmed_mean(share: float) -> Aggregation:
    """Average every coordinate without its largest and its smallest values.

    Of n results the ⌊βn⌋ largest and the ⌊βn⌋ smallest values of each coordinate are left out, and
    the others averaged with equal weights (Yin, Chen, Ramchandran, Bartlett: Byzantine-robust
    distributed learning, ICML 2018, Definition 2).

    Withstands ⌊βn⌋ malicious clients. It acts on every array that a client sends, each coordinate
    for itself, and ignores weights. It keeps all results of a round (`keep_results`).

    Args:
        share: β in [0, 1/2).
    Returns:
        The aggregation. A round with fewer than 1/β results leaves the model unchanged, because
        nothing would be left out; one with such cohorts is refused.
    Raises:
        FedpaError: β is out of range.
    Example:
        >>> import fedpa
        >>> side = fedpa.Server(fedpa.server.sgd(1.0), aggregation=trimmed_mean(0.2))
        >>> side.aggregation.least_clients
        5
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 0.5:
        raise refuse("share", share, "must be at least 0 and below 1/2: it is cut at both ends")

    def combine(rows: Rows, present: Present) -> Result:
        cuts = [_cut(share, n) for n in range(len(present) + 1)]
        return average_middle(rows, present, jnp.asarray(cuts)[jnp.sum(present)])

    return keep_results(combine, least_clients=max(math.ceil(1 / share - SLACK), 3) if share else 1)


SLACK = 1e-9
"""Of products such as 0.29 · 100, which is not 29."""


def _cut(share: float, n: int) -> int:
    """⌊βn⌋, of which two leave at least one."""
    return min(math.floor(share * n + SLACK), max(n - 1, 0) // 2)


def average_middle(rows: Rows, present: Present, cut: Int[Array, ""]) -> Result:
    """The mean of each coordinate's sorted values without `cut` at either end."""
    number = jnp.sum(present)
    place = jnp.arange(len(present))
    is_kept = (place >= cut) & (place < number - cut)

    def average(x: Array) -> Any:
        shape = (-1, *[1] * (x.ndim - 1))
        # Absent rows come last.
        ordered = jnp.sort(jnp.where(present.reshape(shape), x, jnp.inf), axis=0)
        share = jnp.where(is_kept.reshape(shape), ordered / (number - 2 * cut).astype(x.dtype), 0)
        return jnp.sum(share, axis=0)

    return jax.tree.map(average, rows)
