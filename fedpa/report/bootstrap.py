"""Intervals over seeds, by the bootstrap: few seeds, and no belief in a bell curve."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width: what tables put behind a ±."""
        return (self.high - self.low) / 2


def interval_of_mean(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """The percentile interval of the mean over seeds; None of one seed, which says nothing.

    The same values give the same interval: the resampling has a seed of its own.
    """
    if len(values) < 2:
        return None
    array = np.asarray(values, float)
    drawn = np.random.default_rng(0).integers(0, len(array), (RESAMPLES, len(array)))
    tail = (1 - level) / 2
    low, high = np.quantile(array[drawn].mean(axis=1), [tail, 1 - tail])
    return Interval(float(low), float(high))
