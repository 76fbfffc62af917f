"""How honest predicted probabilities are: NLL, Brier score, calibration error, entropy, coverage.

They are those of the predictive distribution p(y | x) = 1/S Σ_s p(y | f_s(x)): of S draws of a
posterior, or of one model (S = 1). A tag counts as a label with the two classes 0 and 1.

    nll                   −log p(y | x), by logsumexp over the draws
    brier                 Σ_c (p_c − 1[y = c])²; of a tag (p − y)²
    accuracy              of classes: argmax p = y; of equally probable ones the lowest
    ece                   Σ_b |Σ_{i in bin b} (p_i − y_i)| / n over 15 equal-width bins of p_i
    entropy               H(p) = −Σ_c p_c log p_c
    mutual_information    1/S Σ_s KL(p_s ‖ p), what a label would say of θ; 0 of one model
    rmse                  √ mean (y − f̄)², f̄ = 1/S Σ_s f_s
    coverage_50, 90, 95   share of y in the central interval of N(f̄, σ² + Var_s f_s)

In the calibration error p_i is the probability of the most probable class and y_i whether that
class is right; of tags p_i is the tag's probability and y_i its label. A label counts as one, also
where an example has several.
"""

import math
from collections.abc import Callable, Collection, Mapping
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from fedpa.errors import FedpaError, find_name
from fedpa.metrics.metric import Counts, Metric, ratio
from fedpa.metrics.streaming import Evaluation
from fedpa.objectives.likelihood import Likelihood, Link
from fedpa.precision import widen
from fedpa.types import Examples, Model

Outputs = Callable[[Model, Examples], Array]
"""`outputs(params, batch)`: f of S draws, stacked on a new leading axis."""
Rows = Shaped[Array, "b n"]

LEVELS = (50, 90, 95)
"""Intervals of a regression whose coverage is measured, in percent."""
NAMES: Mapping[Link, tuple[str, ...]] = {
    "softmax": ("nll", "brier", "accuracy", "ece", "entropy", "mutual_information"),
    "sigmoid": ("nll", "brier", "ece", "entropy", "mutual_information"),
    "normal": ("nll", "rmse", *(f"coverage_{level}" for level in LEVELS)),
}
"""The metrics of each link."""
BINS = 15
"""Bins of the calibration error."""
HISTOGRAM = 2_500
"""Bins of the histograms of entropy and mutual information, equal on a logarithmic scale: the
entropy of a model that is sure of itself, and the mutual information of a narrow posterior, are
tiny everywhere and rank examples all the same."""
LEAST = 1e-10
"""Entropy and mutual information, in nats, at which their first bin ends."""
EDGE = 1e-5
"""A number at most this far below a bin's lower edge is in the bin: 1/3 is, however it is rounded.
In units of the bin's width."""


def uncertainty(
    likelihood: Likelihood, outputs: Outputs | None = None, names: Collection[str] | None = None
) -> Metric:
    """Measure predictions of one model or of S posterior draws: how good and how honest they are.

    - Classes: `nll`, `brier`, `accuracy`, `ece`, `entropy`, `mutual_information`.
    - Tags: the same except for `accuracy`, as means over tags and examples.
    - Regression: `nll`, `rmse`, `coverage_50`, `coverage_90`, `coverage_95`. Of several outputs
      each counts for itself.

    Labels that the likelihood ignores do not count. Of few examples `ece` is biased upwards, so
    that of small clients `brier` is the better number.

    Args:
        likelihood: How outputs become probabilities.
        outputs: `outputs(params, batch)`: f of S draws, (S, *f.shape); default: S = 1,
            `likelihood.outputs(params, batch)[None]`.
        names: Which of them are measured; default: all, and of classes and tags also the sums for
            `reliability`, and histograms `entropy` and `mutual_information` for `auroc`, in
            `Evaluation.vectors`: of each label, for tags of the mean over an example's tags.
    Returns:
        The metric.
    Raises:
        FedpaError: A name is not one of the link's.
    Example:
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: batch["x"] @ params)
        >>> metric = uncertainty(likelihood, names=["brier", "ece"])
        >>> counts = metric.measure(jnp.zeros((2, 2)), {"x": jnp.eye(2), "y": jnp.array([0, 0])})
        >>> metric.values({name: float(v.sum()) for name, v in counts.each.items()})
        {'brier': 0.5, 'ece': 0.5}
    """
    likelihood.check()
    known = NAMES[likelihood.link]
    kind = f"metric of a {likelihood.link} likelihood"
    chosen = known if names is None else [find_name("names", name, known, kind) for name in names]
    predict = outputs or (lambda params, batch: likelihood.outputs(params, batch)[None])
    measure_labels = _measure_numbers if likelihood.link == "normal" else _measure_classes

    def measure(params: Model, batch: Examples) -> Counts:
        f, y = widen(predict(params, batch)), likelihood.labels(batch)
        likelihood.check_labels(f[0], y)
        counts = measure_labels(likelihood, f, y, likelihood.is_counted(batch))
        each = {k: v for k, v in counts.each.items() if k.partition(".")[0] in (*chosen, "labels")}
        return Counts(each, counts.vectors if names is None else {})

    def values(sums: Mapping[str, float]) -> dict[str, float]:
        return {name: _value(name, sums) for name in chosen}

    return Metric(measure, values)


def _value(name: str, sums: Mapping[str, float]) -> float:
    if name == "ece":
        gaps = sum(abs(part) for key, part in sums.items() if key.startswith("ece."))
        return ratio(gaps, sums["labels"])
    mean = ratio(sums[name], sums["labels"])
    return math.sqrt(mean) if name == "rmse" else mean


def mean_log_probabilities(likelihood: Likelihood, f: Array) -> tuple[Array, Array]:
    """log p_s of every draw's classes and log p of their mean; a tag has the classes 0 and 1.

    Args:
        likelihood: Of classes or tags.
        f: Outputs of S draws, (S, *f.shape).
    Returns:
        log p_s, (S, …, k), and log p, (…, k), both finite where probabilities are too small for
        their type.
    Example:
        >>> likelihood = Likelihood(lambda params, batch: params)
        >>> draws = jnp.array([[[0.0, 500.0]], [[0.0, 500.0]]])
        >>> mean_log_probabilities(likelihood, draws)[1].tolist()
        [[-500.0, 0.0]]
    """
    f = widen(f)
    if likelihood.link == "softmax":
        each = jax.nn.log_softmax(f)
    else:
        each = jnp.stack([jax.nn.log_sigmoid(-f), jax.nn.log_sigmoid(f)], axis=-1)
    return each, jax.nn.logsumexp(each, axis=0) - math.log(len(each))


def choose_class(values: Array, y: Array) -> Array:
    """The values of the classes y along the last axis.

    Example:
        >>> choose_class(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0])).tolist()
        [2.0, 3.0]
    """
    return jnp.take_along_axis(values, y[..., None], axis=-1)[..., 0]


def _measure_classes(likelihood: Likelihood, f: Array, y: Array, counted: Array) -> Counts:
    of_tags = likelihood.link == "sigmoid"
    y = y.astype(jnp.int32) if of_tags else y
    draws, mean = mean_log_probabilities(likelihood, f)
    p = jnp.exp(mean)
    top = jnp.argmax(mean, axis=-1)
    right = (y if of_tags else top == y).astype(p.dtype)
    confidence = p[..., 1] if of_tags else choose_class(p, top)
    squares = _squared_errors(p, y)
    entropy = _entropy(mean)
    information = _mutual_information(draws, mean)
    numbers = {
        "labels": jnp.ones_like(entropy),
        "nll": -choose_class(mean, y),
        "brier": squares / 2 if of_tags else squares,
        "accuracy": right,
        "entropy": entropy,
        "mutual_information": information,
    }
    each = {name: _sum_counted(values, counted) for name, values in numbers.items()}
    bins = _bin_calibration(confidence, right, counted)
    gaps = bins["bin_confidence"] - bins["bin_right"]
    each |= {f"ece.{place}": gaps[:, place] for place in range(BINS)}
    highest = math.log(math.log(p.shape[-1]) / LEAST)
    histograms = {}
    for name, values in (("entropy", entropy), ("mutual_information", information)):
        scores, kept = (_mean_of_tags(values, counted)) if of_tags else (values, counted)
        logarithms = jnp.log(jnp.maximum(scores, LEAST) / LEAST)
        histograms[name] = _histogram(logarithms, kept, highest)
    return Counts(each, bins | histograms)


def _measure_numbers(likelihood: Likelihood, f: Array, y: Array, counted: Array) -> Counts:
    sigma = likelihood.noise
    y = y.astype(f.dtype)
    mean = jnp.mean(f, axis=0)
    densities = -0.5 * ((y[None] - f) / sigma) ** 2 - 0.5 * math.log(2 * math.pi * sigma**2)
    sd = jnp.sqrt(sigma**2 + jnp.var(f, axis=0))
    numbers = {
        "labels": jnp.ones_like(y),
        "nll": math.log(len(f)) - jax.nn.logsumexp(densities, axis=0),
        "rmse": (y - mean) ** 2,
    }
    for level in LEVELS:
        half = NormalDist().inv_cdf((1 + level / 100) / 2) * sd
        numbers[f"coverage_{level}"] = (jnp.abs(y - mean) <= half).astype(f.dtype)
    return Counts({name: _sum_counted(values, counted) for name, values in numbers.items()})


def _rows(values: Array) -> Rows:
    """A row of labels for each example."""
    return values.reshape(len(values), -1)


def _sum_counted(values: Array, counted: Bool[Array, "..."]) -> Float[Array, " b"]:
    return jnp.sum(_rows(jnp.where(counted, values, 0)), axis=1)


def _entropy(log_p: Array) -> Array:
    """−Σ p log p over the last axis, with 0 log 0 = 0."""
    p = jnp.exp(log_p)
    return jnp.sum(jnp.where(p == 0, 0, -p * log_p), axis=-1)


def _mutual_information(draws: Array, mean: Array) -> Array:
    """1/S Σ_s KL(p_s ‖ p) over the last axis, exact also where all p_s are nearly p.

    With a = log p_s − log p, Σ_c p (eᵃ − 1) = 0, and KL(p_s ‖ p) = Σ_c p (a eᵃ − (eᵃ − 1)): terms
    of a²/2 and more, none of which is negative.
    """
    a = draws - mean[None]
    series = a**2 * (1 / 2 + a * (1 / 3 + a * (1 / 8 + a * (1 / 30 + a / 144))))
    terms = jnp.where(jnp.abs(a) < 0.1, series, a * jnp.exp(a) - jnp.expm1(a))
    p = jnp.exp(mean)
    weighted = jnp.where(p[None] == 0, 0, p[None] * terms)
    return jnp.mean(jnp.sum(weighted, axis=-1), axis=0)


def _squared_errors(p: Array, y: Int[Array, "..."]) -> Array:
    """Σ_c (p_c − 1[y = c])²."""
    classes = jax.lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
    return jnp.sum(jnp.where(classes == y[..., None].astype(jnp.int32), 1 - p, p) ** 2, axis=-1)


def _find_bin(values: Array, highest: float, bins: int) -> Array:
    """The bin of each value of [0, highest]; the last bin has its upper edge too."""
    place = jnp.floor(values * (bins / highest) + EDGE)
    return jnp.clip(place, 0, bins - 1).astype(jnp.int32)


def _bin_calibration(confidence: Array, right: Array, counted: Array) -> dict[str, Array]:
    """Sums by bin of each example's labels: their number, probabilities and right ones."""
    own = jax.nn.one_hot(_rows(_find_bin(confidence, 1.0, BINS)), BINS, dtype=confidence.dtype)
    numbers = {"count": jnp.ones_like(confidence), "confidence": confidence, "right": right}
    return {
        f"bin_{name}": jnp.einsum("bn,bnk->bk", _rows(jnp.where(counted, values, 0)), own)
        for name, values in numbers.items()
    }


def _mean_of_tags(values: Array, counted: Array) -> tuple[Array, Array]:
    """Each example's mean over its counted tags, and whether there are any."""
    number = _sum_counted(jnp.ones_like(values), counted)
    return _sum_counted(values, counted) / jnp.maximum(number, 1), number > 0


def _histogram(values: Array, counted: Array, highest: float) -> Float[Array, "b k"]:
    """How many of each example's values are in each bin of [0, highest]; NaN is in none."""
    places = _rows(_find_bin(values, highest, HISTOGRAM))
    weights = _rows(counted & ~jnp.isnan(values)).astype(values.dtype)
    examples = jax.lax.broadcasted_iota(jnp.int32, places.shape, 0)
    empty = jnp.zeros((len(places), HISTOGRAM), values.dtype)
    return empty.at[examples, places].add(weights)


class Reliability(NamedTuple):
    """A reliability diagram: in each bin of probabilities, how often they come true.

    Args:
        confidence: Mean probability in each of 15 bins; NaN where there is none.
        frequency: Share of these that came true; NaN where there is none.
        counts: How many there are.
    Example:
        >>> diagram = Reliability(np.array([0.2, 0.7]), np.array([0.1, 0.5]), np.array([30, 10]))
        >>> gaps = np.abs(diagram.confidence - diagram.frequency)
        >>> float((gaps * diagram.counts).sum() / diagram.counts.sum())  # the calibration error
        0.125
    """

    confidence: np.ndarray
    frequency: np.ndarray
    counts: np.ndarray


def reliability(evaluation: Evaluation) -> Reliability:
    """Compute the reliability diagram of an evaluation of `uncertainty`.

    Probabilities are those of `ece`: of the most probable class, or of every tag.

    Args:
        evaluation: What the evaluator of `uncertainty(likelihood)` returned, with no `names`.
    Returns:
        The diagram.
    Raises:
        FedpaError: The evaluation has no bins.
    Example:
        >>> from fedpa.metrics import make_evaluator
        >>> likelihood = fedpa.objectives.Likelihood(lambda params, batch: batch["x"] @ params)
        >>> data = fedpa.data.from_mapping({"a": {"x": np.eye(2), "y": np.array([0, 0])}})
        >>> diagram = reliability(make_evaluator(uncertainty(likelihood), data, 2)(np.eye(2)))
        >>> [round(float(part[10]), 3) for part in diagram]
        [0.731, 0.5, 2.0]
    """
    sums = evaluation.vectors
    if "bin_count" not in sums:
        raise FedpaError(
            "this evaluation has no reliability bins: evaluate uncertainty(likelihood) of classes "
            "or tags, without names"
        )
    counts = sums["bin_count"]
    share = np.divide(1.0, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
    return Reliability(sums["bin_confidence"] * share, sums["bin_right"] * share, counts)


def auroc(in_distribution: np.ndarray, out_of_distribution: np.ndarray) -> float:
    """Compute how well a score tells two sets apart, from its histograms: the area under the ROC.

    It is the probability that an example out of distribution has a higher score than one in
    distribution. Scores in the same bin are ties, which count half.

    Args:
        in_distribution: How many scores are in each bin, e.g. `evaluation.vectors["entropy"]`.
        out_of_distribution: The same of the other set, with the same bins.
    Returns:
        The area, in [0, 1]; NaN if one set is empty.
    Raises:
        FedpaError: They have different numbers of bins.
    Example:
        >>> auroc(np.array([3.0, 1.0, 0.0]), np.array([0.0, 2.0, 2.0]))
        0.9375
    """
    lower, upper = np.asarray(in_distribution, float), np.asarray(out_of_distribution, float)
    if lower.shape != upper.shape or lower.ndim != 1:
        raise FedpaError(
            f"out_of_distribution has {upper.shape} bins and in_distribution {lower.shape}: both "
            "must be histograms with the same bins"
        )
    below = np.cumsum(lower) - lower
    return ratio(float(upper @ (below + lower / 2)), float(lower.sum() * upper.sum()))
