"""Conclusions of a comparison: sentences computed from its numbers."""

import math
from collections.abc import Sequence

import numpy as np

from fedpa.algorithms.fedopt import SAMPLING, stage
from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.comparison import Comparison, Difference
from fedpa.experiments.report.runs import Group

ONE_PATH = 1.5
"""Effective sample sizes below it count as one sample."""
SAME_DIRECTION = 0.99
"""Cosines above it, 8°, count as the same direction."""


def conclude(comparison: Comparison) -> list[str]:
    """State which methods differ from the reference by more than their interval, and which do not.

    Args:
        comparison: The methods of one task.
    Returns:
        One sentence about the reference, and one for each method and its control.
    """
    sentences = []
    paired = [
        (row.method, row.difference)
        for row in comparison.rows
        if isinstance(row.difference, Difference)
    ]
    if paired:
        seeds = sorted({row.seeds for row in comparison.rows})
        over = f"over {seeds[0]} seed{'s' if seeds[-1] > 1 else ''}"
        over = over if len(seeds) == 1 else f"over {seeds[0]} to {seeds[-1]} seeds"
        found: dict[str, list[str]] = {}
        for method, difference in paired:
            verdict = judge(difference, comparison.scale.lower)
            found.setdefault(_VERDICTS[verdict], []).append(f"{method} ({_format(difference)})")
        parts = [
            f"{word} {join_words(found[word])}" for word in _VERDICTS.values() if word in found
        ]
        sentences.append(
            f"Compared with {comparison.reference} {over}, final {comparison.scale.metric} is "
            f"{', '.join(parts)}."
        )
    for contrast in comparison.contrasts:
        if not isinstance(contrast.difference, Difference):
            continue
        verdict, number = judge(contrast.difference, comparison.scale.lower), contrast.difference
        pair = f"{contrast.method} {{}} its control {contrast.control} ({_format(number)})"
        if verdict == "unknown":
            text = f"Whether {pair.format('differs from')} cannot be decided from one seed."
        elif verdict == "same":
            text = pair.format("does not differ by more than the interval from")
            text += f": no effect of {contrast.isolates} is visible."
        else:
            text = f"{pair.format(f'is {verdict} than')}: an effect of {contrast.isolates}."
        sentences.append(text)
    return sentences


_VERDICTS = {
    "better": "better with",
    "worse": "worse with",
    "same": "within the interval with",
    "unknown": "undecided (one seed) with",
}


def judge(difference: Difference, lower: bool) -> str:
    """Judge a difference by its interval.

    Args:
        difference: From the reference.
        lower: Whether lower values of the metric are better.
    Returns:
        `better`, `worse`, `same` (0 is in the interval), or `unknown` without one.
    """
    interval = difference.interval
    if interval is None or not math.isfinite(interval.half):
        return "unknown"
    if interval.low <= 0 <= interval.high:
        return "same"
    return "better" if (difference.mean < 0) == lower else "worse"


def _format(difference: Difference) -> str:
    interval = difference.interval
    known = interval is not None and math.isfinite(interval.half)
    return f"{difference.mean:+.4f}" + (f" ± {interval.half:.4f}" if known and interval else "")


def join_words(words: Sequence[str]) -> str:
    """Join words: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def explain_controls(groups: Sequence[Group]) -> list[str]:
    """Explain each control among the methods: what it is and what a difference from it shows."""
    texts = []
    for group in groups:
        method = METHODS.get(group.runs[0].method or "")
        if method is not None and method.control_of:
            texts.append(
                f"{group.label}: {method.summary}. A difference from it is an effect of "
                f"{method.isolates}."
            )
    return texts


def interpret_diagnostics(groups: Sequence[Group]) -> list[str]:
    """Interpret the samples' diagnostics, for each method that samples.

    Args:
        groups: The runs by method.
    Returns:
        A sentence per method and number; none for numbers that were not recorded.
    """
    texts = []
    for group in groups:
        size = _average(group, "train/ess")
        if size is not None:
            texts.append(f"{group.label}: {_interpret_size(size, _count_samples(group))}")
        cosine = _average(group, "train/correction_cosine")
        if cosine is not None:
            degrees = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
            number = f"cosine {cosine:.3f}, {degrees:.0f}°"
            text = f"the correction turns the deltas away from FedAvg's ({number})."
            if cosine > SAME_DIRECTION:
                text = f"the correction hardly turns the deltas ({number}): it changes their length"
                text += ", as another server learning rate would."
            texts.append(f"{group.label}: {text}")
    return texts


def _interpret_size(size: float, samples: int | None) -> str:
    of = "" if samples is None else f" of {samples} sample{'' if samples == 1 else 's'}"
    said = f"an effective sample size of {size:.1f}{of}: "
    if samples == 1:
        return said + "one sample has no covariance."
    if size < ONE_PATH:
        return said + "the samples are one path; no covariance can be estimated from them."
    if samples is None or size < samples / 2:
        return said + "the samples are correlated; their covariance is a rough estimate."
    return said + "the samples are nearly independent."


def _average(group: Group, key: str) -> float | None:
    """Average a number over the rounds that sample, and over seeds."""
    values = [
        record[key]
        for history in group.histories
        for record in history
        if key in record and stage(record["phase"]) == SAMPLING and np.isfinite(record[key])
    ]
    return float(np.mean(values)) if values else None


def _count_samples(group: Group) -> int | None:
    samples = group.runs[0].settings.get("hyperparameters.samples")
    return samples if isinstance(samples, int) else None
