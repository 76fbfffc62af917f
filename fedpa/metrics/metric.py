"""What a metric is: numbers per example that add up, and what is made of their sums.

Sums can be taken over a client, over everybody, over batches in any order; so evaluation streams,
and the same metric is known for each client and for all.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Array, Float

from fedpa.types import Examples, Model

T = TypeVar("T")


class Counts(NamedTuple):
    """What a metric counts in a batch: numbers per example, which add up.

    Args:
        each: Numbers of each example, by name; summed for every client and for all.
        vectors: Vectors of each example (one number by class, say), by name; summed for all only
            (default: none).
    Example:
        >>> import jax.numpy as jnp
        >>> counts = Counts({"examples": jnp.ones(3), "right": jnp.array([1.0, 0.0, 1.0])})
        >>> {name: float(numbers.sum()) for name, numbers in counts.each.items()}
        {'examples': 3.0, 'right': 2.0}
    """

    each: Mapping[str, Float[Array, " b"]]
    vectors: Mapping[str, Float[Array, "b k"]] = {}


class Metric(NamedTuple):
    """A metric: numbers per example that add up, and what is made of their sums.

    The sums over a client's examples give the client's values, those over all examples the values
    of all; so evaluation streams, in batches of any order.

    Args:
        measure: (params, batch) → `Counts`; compiled by the caller.
        values: Sums of `Counts.each` → metrics by name, of a client or of all. Where there is
            nothing to divide by, a metric is NaN.
        overall: Sums of `Counts.vectors` → further metrics of all examples together (default:
            none).
    Example:
        >>> def measure(params, batch):
        ...     errors = (batch["x"] @ params - batch["y"]) ** 2
        ...     return Counts({"examples": errors * 0 + 1, "squares": errors})
        >>> mse = Metric(measure, lambda sums: {"mse": sums["squares"] / sums["examples"]})
        >>> mse.values({"squares": 6.0, "examples": 3.0})
        {'mse': 2.0}
    """

    measure: Callable[[Model, Examples], Counts]
    values: Callable[[Mapping[str, float]], dict[str, float]]
    overall: Callable[[Mapping[str, np.ndarray]], dict[str, float]] = lambda vectors: {}


def join_metrics(*metrics: Metric) -> Metric:
    """Join metrics into one that is measured in one pass over the data.

    Of two metrics with a value of the same name the later one's is kept. What they count is told
    apart by a number: "1/loss" is the second metric's "loss".

    Args:
        *metrics: The metrics; all take the same batches.
    Returns:
        A metric with the values of all.
    Example:
        >>> import jax.numpy as jnp
        >>> def count(params, batch):
        ...     return Counts({"n": jnp.ones_like(batch["x"]), "sum": batch["x"]})
        >>> mean = Metric(count, lambda sums: {"mean": sums["sum"] / sums["n"]})
        >>> both = join_metrics(mean, Metric(count, lambda sums: {"n": sums["n"]}))
        >>> each = both.measure(None, {"x": jnp.array([1.0, 2.0])}).each
        >>> both.values({name: float(numbers.sum()) for name, numbers in each.items()})
        {'mean': 1.5, 'n': 2.0}
    """

    def measure(params: Model, batch: Examples) -> Counts:
        each, vectors = dict[str, Array](), dict[str, Array]()
        for place, metric in enumerate(metrics):
            counts = metric.measure(params, batch)
            each |= {f"{place}/{name}": numbers for name, numbers in counts.each.items()}
            vectors |= {f"{place}/{name}": numbers for name, numbers in counts.vectors.items()}
        return Counts(each, vectors)

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        parts = (metric.values(_of(place, sums)) for place, metric in enumerate(metrics))
        return {name: value for part in parts for name, value in part.items()}

    def overall(vectors: Mapping[str, np.ndarray]) -> dict[str, float]:
        parts = (metric.overall(_of(place, vectors)) for place, metric in enumerate(metrics))
        return {name: value for part in parts for name, value in part.items()}

    return Metric(measure, values, overall)


def _of(place: int, sums: Mapping[str, T]) -> dict[str, T]:
    """The sums of one of joined metrics, by its own names."""
    own = f"{place}/"
    return {name.removeprefix(own): v for name, v in sums.items() if name.startswith(own)}


def ratio(part: float, whole: float, undefined: float = math.nan) -> float:
    """part / whole; `undefined` where there is nothing to divide by.

    Example:
        >>> ratio(1.0, 4.0), ratio(0.0, 0.0)
        (0.25, nan)
    """
    return float(part) / float(whole) if whole else undefined


LOWER = ("loss", "perplexity", "error", "mse", "rmse", "mae", "nll", "brier", "ece")
"""Words of a metric's name that say that lower is better."""


def lower_is_better(name: str) -> bool:
    """Whether a metric's name says so: eval/loss, valid/test_mse; `Best(metric, lower=…)` decides.

    Example:
        >>> lower_is_better("eval/mse"), lower_is_better("eval/accuracy_p10")
        (True, False)
    """
    return any(word in LOWER for word in name.rpartition("/")[2].lower().split("_"))
