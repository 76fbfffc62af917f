"""Intervals over seeds: the bootstrap, corrected for few seeds.

The percentile bootstrap is too narrow for few seeds: for normal data its 95 % intervals cover 50 %
of the time for 2 seeds, 75 % for 3, 83 % for 5, 90 % for 10. Two known errors cause most of that,
and are corrected: resampled values have the variance divided by n, not by n − 1, a factor
√(n / (n − 1)); and the spread is only estimated, a factor of Student's quantile with n − 1 degrees
of freedom over the normal one.

Tables print ±, so the interval is symmetric, with the longer tail on both sides. Then it covers
93 % of the time for 2 seeds of normal data and 95 to 96 % for more; 88 to 91 % for skewed data
(exponential), which no small sample can correct. The interval of two seeds is about nine times as
wide as their distance.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

LEVEL = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width: the number after ± in tables."""
        return (self.high - self.low) / 2


def interval_of_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Compute the symmetric interval of the mean over seeds; None for one seed.

    The same values give the same interval: the resampling has a fixed seed.
    """
    if len(values) < 2:
        return None
    low, high = band_of_mean(np.asarray(values, float), level)
    return Interval(float(low), float(high))


def band_of_mean(values: np.ndarray, level: float = LEVEL) -> tuple[Any, Any]:
    """Compute the low and high ends of the intervals of means over axis 0, one per column.

    For one seed they are NaN, which figures leave out.
    """
    n = len(values)
    mean = np.mean(values, axis=0)
    if n < 2:
        return np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    # Counts of each seed in each resample, so that all means are one product.
    counts = (drawn[:, :, None] == np.arange(n)).sum(axis=1)
    tail = (1 - level) / 2
    means = np.tensordot(counts / n, values - mean, axes=1)
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    widened = math.sqrt(n / (n - 1)) * stdtrit(n - 1, 1 - tail) / ndtri(1 - tail)
    half = widened * np.maximum(-low, high)
    return mean - half, mean + half
