"""What an evaluation makes of a metric: sums over batches, and values of the sums."""

import functools

import jax
import numpy as np
from hypothesis import strategies as st

from fedpa.metrics import Metric


@functools.cache
def measured(metric: Metric):
    return jax.jit(metric.measure)


def sums(metric, params, batches):
    """Sums of `each` and of `vectors` over batches, in double precision."""
    each, vectors = {}, {}
    for batch in batches:
        counts = measured(metric)(params, batch)
        for total, parts in (each, counts.each), (vectors, counts.vectors):
            for name, part in parts.items():
                assert part.shape[0] == len(next(iter(batch.values())))
                total[name] = total.get(name, 0.0) + np.sum(np.asarray(part, np.float64), axis=0)
    return each, vectors


def values(metric, params, batches):
    """All of a metric's values over batches."""
    each, vectors = sums(metric, params, batches)
    return metric.values(each) | metric.overall(vectors)


def parts(batch, owners):
    """The examples of each owner."""
    return [{k: v[owners == i] for k, v in batch.items()} for i in np.unique(owners)]


def owners(examples):
    """Random partitions of so many examples, into at most as many parts."""
    return st.lists(st.integers(0, examples - 1), min_size=examples, max_size=examples).map(
        np.array
    )
