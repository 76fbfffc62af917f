"""Conclusions of a comparison: sentences computed from its numbers."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedpa.algorithms.fedopt import SAMPLING, stage
from fedpa.experiments.methods import METHODS
from fedpa.experiments.report.bootstrap import LEVEL
from fedpa.experiments.report.comparison import Comparison, Contrast, Difference
from fedpa.experiments.report.runs import Group

ONE_PATH = 1.5
"""Effective sample sizes below it count as one sample."""
SAME_DIRECTION = 0.99
"""Cosines above it, 8°, count as the same direction."""


def conclude(comparison: Comparison) -> list[str]:
    """State which differences exceed seed noise, and what explains those of methods with a control.

    A method that differs from its control shows an effect of what the control leaves out. One that
    differs from the reference but not from its control shows what both have in common, provided
    that the control differs from the reference, too. One that differs from neither leaves nothing
    to explain.

    Args:
        comparison: The methods of one task.
    Returns:
        How often chance alone exceeds the intervals, if several are judged; then one sentence with
        all differences and their explanations. Empty if there is nothing to compare.
    """
    lower = comparison.scale.lower
    paired = {
        row.method: row.difference
        for row in comparison.rows
        if isinstance(row.difference, Difference)
    }
    contrasts = [own for own in comparison.contrasts if isinstance(own.difference, Difference)]
    # A difference between the reference and its control or method is among `paired`, too.
    others = [own for own in contrasts if comparison.reference not in (own.method, own.control)]
    judged = [*paired.values(), *(own.difference for own in others)]
    decided = sum(isinstance(own, Difference) and judge(own, lower) != "unknown" for own in judged)
    sentences = []
    if decided > 1:
        chance = min(1.0, decided * (1 - LEVEL))
        sentences.append(
            f"{decided} differences are judged, each by its own {LEVEL:.0%} interval over seeds. "
            f"If none were real, one or more would exceed its interval in up to {chance:.0%} of "
            "such comparisons."
        )
    parts = [_list_differences(comparison, paired)] if paired else []
    parts += [_explain_contrast(own, comparison, paired) for own in contrasts]
    if parts:
        sentences.append("; ".join(parts) + ".")
    return sentences


_VERDICTS = {
    "better": "better with",
    "worse": "worse with",
    "same": "within seed noise with",
    "unknown": "undecided (one seed) with",
}


def _list_differences(comparison: Comparison, paired: Mapping[str, Difference]) -> str:
    """List the methods that are better, worse or not distinguishable from the reference."""
    seeds = sorted({row.seeds for row in comparison.rows})
    over = f"over {seeds[0]} seed{'s' if seeds[-1] > 1 else ''}"
    over = over if len(seeds) == 1 else f"over {seeds[0]} to {seeds[-1]} seeds"
    found: dict[str, list[str]] = {}
    for method, difference in paired.items():
        verdict = _VERDICTS[judge(difference, comparison.scale.lower)]
        found.setdefault(verdict, []).append(f"{method} ({_format(difference)})")
    parts = [f"{word} {join_words(found[word])}" for word in _VERDICTS.values() if word in found]
    about = f"Compared with {comparison.reference} {over}, final {comparison.scale.metric} is "
    return about + ", ".join(parts)


def _explain_contrast(
    contrast: Contrast, comparison: Comparison, paired: Mapping[str, Difference]
) -> str:
    """Explain a method's difference by its difference from its control."""
    assert isinstance(contrast.difference, Difference)
    lower, reference = comparison.scale.lower, comparison.reference
    method, control = contrast.method, contrast.control
    number = f"({_format(contrast.difference)})"
    verdict = judge(contrast.difference, lower)
    if verdict == "unknown":
        return f"whether {method} differs from its control {control} {number} needs more seeds"
    if verdict != "same":
        effect = f"an effect of {contrast.isolates}"
        return f"{method} is {verdict} than its control {control} {number}, {effect}"
    about = f"{method} is within seed noise of its control {control} {number}"
    own, its = (judge(paired[m], lower) if m in paired else "unknown" for m in (method, control))
    if own == "same":
        return f"{about} and of {reference}: there is nothing to explain"
    change = "gain" if own == "better" else "loss"
    if _is_fedavg(comparison) and own == its != "unknown":
        cause = f"{contrast.shares}, which both have, explains its {change}"
        return f"{about}: {cause}, not {contrast.isolates}"
    if _is_fedavg(comparison) and own != "unknown" and its == "same":
        return (
            f"{about}, which is within seed noise of {reference}: more seeds must tell whether "
            f"{contrast.shares} or {contrast.isolates} explains its {change}"
        )
    return f"{about}: no effect of {contrast.isolates} is visible"


def _is_fedavg(comparison: Comparison) -> bool:
    """Whether the reference is FedAvg, from which controls differ in one thing after the other."""
    return any(
        group.label == comparison.reference and group.runs[0].method == "fedavg"
        for group in comparison.groups
    )


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
