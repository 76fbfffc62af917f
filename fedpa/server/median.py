"""The median of every coordinate (Yin et al. 2018)."""

import jax.numpy as jnp

from fedpa.server.aggregation import Aggregation, Result
from fedpa.server.keep_results import Present, Rows, keep_results
from fedpa.server.trimmed_mean import average_middle


def median() -> Aggregation:
    """Take the median of every coordinate; of two middle values their mean.

    Yin, Chen, Ramchandran, Bartlett: Byzantine-robust distributed learning, ICML 2018,
    Definition 1.

    Withstands any minority of malicious clients, but is not the mean of clients that differ: with
    label skew it forgets what few clients have. It acts on every array that a client sends, each
    coordinate for itself, and ignores weights. It keeps all results of a round (`keep_results`).

    Returns:
        The aggregation.
    Example:
        >>> import fedpa, jax, jax.numpy as jnp
        >>> middle, results = median(), jnp.asarray([[1.0], [2.0], [1e38]])
        >>> total, _ = fedpa.server.add_all(middle, results, jnp.ones(3))
        >>> float(middle.value(total).mean[0])
        2.0
    """
    return keep_results(coordinate_median)


def coordinate_median(rows: Rows, present: Present) -> Result:
    """The median of each coordinate over the rows that are present."""
    return average_middle(rows, present, (jnp.sum(present) - 1) // 2)
