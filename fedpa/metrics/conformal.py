"""Federated conformal prediction sets (Lu et al., ICML 2023).

The score of a label is 1 − p(y | x). From K clients with n_k calibration scores, N in all, the
threshold is the score at rank ⌈(1 − α)(N + K)⌉, infinite where that exceeds N. The set of x has
all classes with scores up to the threshold. It has the label with probability

    1 − α ≤ P(y in the set) ≤ 1 − α + K / (N + K)        (upper bound: without ties)

of a new example whose client is drawn with probability (n_k + 1)/(N + K). This holds for that
mixture of the clients, not for each of them: the metric reports the coverage of every client.

A client sends its number of scores and, of up to 1,000, all of them in order; of more, 1,000 order
statistics, each score being replaced by the next higher one that is sent. That can only raise the
threshold, so the lower bound stays.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fedpa.data.federated import FederatedData, check_when_read
from fedpa.errors import DataError, FedpaError, check_integer, refuse
from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.metrics.streaming import choose_clients, read_batches
from fedpa.metrics.uncertainty import Outputs, choose_class, mean_log_probabilities
from fedpa.objectives.likelihood import Likelihood
from fedpa.types import Examples, Model

SKETCH = 1_000
"""Scores that a client sends at most."""


class ScoreSketch(NamedTuple):
    """A client's calibration scores, as it sends them.

    Args:
        scores: Scores in ascending order: all of them, or some order statistics.
        counts: How many of the client's scores each stands for: itself and those below it, down
            to the one before.
    Example:
        >>> ScoreSketch(np.array([0.1, 0.7]), np.array([2, 1]))  # of three scores
        ScoreSketch(scores=array([0.1, 0.7]), counts=array([2, 1]))
    """

    scores: np.ndarray
    counts: np.ndarray


def sketch_scores(scores: np.ndarray, size: int = SKETCH) -> ScoreSketch:
    """Sketch a client's scores: all of them, or those at `size` evenly spaced ranks.

    Args:
        scores: n scores, in any order.
        size: Most scores that are sent, at least 1; default: 1,000.
    Returns:
        The scores at the ranks ⌈j·n/size⌉, j = 1 … size; all if n ≤ size.
    Raises:
        FedpaError: A score is not finite, or the size is not valid.
    Example:
        >>> sketch_scores(np.array([0.3, 0.1, 0.2, 0.4]), size=2)
        ScoreSketch(scores=array([0.2, 0.4]), counts=array([2, 2]))
    """
    check_integer("size", size, 1)
    ordered = np.sort(np.asarray(scores, np.float64).ravel())
    if not np.isfinite(ordered).all():
        raise FedpaError("scores are not finite: has the model diverged?")
    n, most = len(ordered), min(size, len(ordered))
    ranks = -(-np.arange(1, most + 1) * n // most) if n else np.zeros(0, int)
    return ScoreSketch(ordered[ranks - 1], np.diff(ranks, prepend=0))


def conformal_threshold(sketches: Sequence[ScoreSketch], alpha: float) -> float:
    """Compute the score at rank ⌈(1 − α)(N + K)⌉ of all N scores of K clients.

    Args:
        sketches: What the K clients sent. Each raises the rank, also one without scores: leave
            those out, and with them their share (n_k + 1)/(N + K) of the guarantee.
        alpha: Probability α that a label is not in its set, in (0, 1).
    Returns:
        The threshold; infinite if the rank exceeds N, and sets then have all classes.
    Raises:
        FedpaError: α is not between 0 and 1, or there is no client.
    Example:
        >>> sketches = [sketch_scores(np.arange(1.0, 10.0))]  # the ninth of nine scores
        >>> conformal_threshold(sketches, 0.1), conformal_threshold(sketches, 0.05)
        (9.0, inf)
    """
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1:
        raise refuse("alpha", alpha, "must be a number between 0 and 1")
    if not sketches:
        raise FedpaError("sketches has no client: at least one is needed")
    scores = np.concatenate([sketch.scores for sketch in sketches])
    counts = np.concatenate([sketch.counts for sketch in sketches])
    order = np.argsort(scores, kind="stable")
    # As the user wrote α: 1 − 0.7 is above 0.3 in binary, and the rank one too high.
    rank = math.ceil((1 - Fraction(repr(float(alpha)))) * (int(counts.sum()) + len(sketches)))
    place = np.searchsorted(np.cumsum(counts[order]), rank)
    return math.inf if place == len(order) else float(scores[order[place]])


def calibrate_sets(
    likelihood: Likelihood,
    params: Model,
    data: FederatedData,
    alpha: float = 0.1,
    *,
    outputs: Outputs | None = None,
    size: int = SKETCH,
    batch_size: int = 100,
) -> float:
    """Compute the threshold of `conformal_sets` from calibration clients.

    Clients without a label that counts are left out.

    Args:
        likelihood: Of classes.
        params: The model.
        data: Calibration clients; not examples that trained the model.
        alpha: Probability α that a label is not in its set, in (0, 1); default: 0.1.
        outputs: As in `uncertainty`: f of S draws; default: that of the model.
        size: Most scores that a client sends; default: 1,000.
        batch_size: Examples that are computed at a time.
    Returns:
        The threshold.
    Raises:
        FedpaError: The likelihood is not of classes, scores are not finite, or α is not between 0
            and 1.
        DataError: No client has a label that counts.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: batch["x"] @ params)
        >>> client = {"x": np.eye(2, dtype=np.float32)[[0] * 9], "y": np.zeros(9, np.int32)}
        >>> data = fedpa.data.from_mapping({"a": client})
        >>> round(calibrate_sets(likelihood, np.eye(2, dtype=np.float32), data), 3)
        0.269
    """
    score = _make_score(likelihood, outputs)
    chosen = choose_clients(check_when_read(data), None)
    total = sum(taken for _, taken in chosen)

    @eqx.filter_jit
    def measure(params: Model, batch: Examples) -> tuple[Array, Array]:
        found = choose_class(score(params, batch), likelihood.labels(batch))
        counted = likelihood.is_counted(batch)
        return found.reshape(len(found), -1), counted.reshape(len(found), -1)

    parts: list[list[np.ndarray]] = [[] for _ in chosen]
    for batch in read_batches(data, chosen, min(batch_size, max(total, 1))):
        scores, counted = (
            a[: len(batch.owners)] for a in jax.device_get(measure(params, batch[0]))
        )
        for place in np.unique(batch.owners):
            own = batch.owners == place
            parts[place].append(scores[own][counted[own]])
    of_clients = [np.concatenate(part) for part in parts if part]
    sketches = [sketch_scores(scores, size) for scores in of_clients if len(scores)]
    if not sketches:
        raise DataError(f"none of the {len(data.ids)} clients to calibrate on has a label")
    return conformal_threshold(sketches, alpha)


def conformal_sets(
    likelihood: Likelihood, threshold: float, outputs: Outputs | None = None
) -> Metric:
    """Measure prediction sets: their `coverage` and mean `set_size`, of all and of each client.

    Args:
        likelihood: Of classes.
        threshold: As `calibrate_sets` or `conformal_threshold` computes it: the set has the
            classes with 1 − p ≤ threshold.
        outputs: As in `uncertainty`: f of S draws; default: that of the model.
    Returns:
        The metric.
    Raises:
        FedpaError: The likelihood is not of classes.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: batch["x"] @ params)
        >>> metric = conformal_sets(likelihood, threshold=0.4)
        >>> counts = metric.measure(jnp.eye(2), {"x": jnp.eye(2), "y": jnp.array([0, 0])})
        >>> metric.values({name: float(v.sum()) for name, v in counts.each.items()})
        {'coverage': 0.5, 'set_size': 1.0}
    """
    score = _make_score(likelihood, outputs)

    def measure(params: Model, batch: Examples) -> Counts:
        found = score(params, batch)
        inside = (found <= threshold).astype(found.dtype)
        counted = likelihood.is_counted(batch)
        numbers = {
            "labels": jnp.ones(counted.shape, found.dtype),
            "covered": choose_class(inside, likelihood.labels(batch)),
            "size": jnp.sum(inside, axis=-1),
        }
        rows = {name: jnp.where(counted, values, 0) for name, values in numbers.items()}
        return Counts({k: jnp.sum(v.reshape(len(v), -1), axis=1) for k, v in rows.items()})

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        return {
            "coverage": ratio(sums["covered"], sums["labels"]),
            "set_size": ratio(sums["size"], sums["labels"]),
        }

    return Metric(measure, values)


def _make_score(
    likelihood: Likelihood, outputs: Outputs | None
) -> Callable[[Model, Examples], Array]:
    """(params, batch) → 1 − p of every class, (b, k) or (b, t, k)."""
    if likelihood.link != "softmax":
        raise refuse("link", likelihood.link, "conformal sets are of classes: must be softmax")
    predict = outputs or (lambda params, batch: likelihood.outputs(params, batch)[None])

    def score(params: Model, batch: Examples) -> Array:
        return -jnp.expm1(mean_log_probabilities(likelihood, predict(params, batch))[1])

    return score
