"""The rule that says when a metric has stopped falling, from its values round by round."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from fedpa.errors import check_integer, check_number, check_type, refuse


class Plateau(NamedTuple):
    """A rule for the round after which a metric no longer improves, robust to the cohorts' noise.

    Let v be the metric's finite values so far (negated if higher is better), w = `window`, and in
    the 2w last of them b the first w and a the last w. Their decrease is d = mean(b) − mean(a). The
    noise of one value follows from neighbours, which a trend hardly moves apart:
    s² = Σ (v_{i+1} − v_i)² / (2(2w − 1)), and the standard error of d is s √(2/w).

    A value is *level* if d ≤ max(`errors` · s √(2/w), `tolerance` · |mean(b)|). The plateau is
    reached after the first round in which the last w values, each with its own d, are level: after
    3w − 1 values at the earliest. Rounds without a finite value count for `at_least` and `at_most`
    only.

    Args:
        metric: Its name in records: "train/loss", which every round has, or a metric of the
            evaluation, with a value only in rounds that evaluate (default: "train/loss").
        window: w ≥ 2, values that are averaged (default: 10). A longer window sees a slower fall,
            and waits longer.
        errors: Standard errors ≥ 0 by which d must exceed 0 for the metric to be falling (default:
            1).
        tolerance: Share ≥ 0 of the metric by which it must fall from one window to the next, for
            losses without noise (default: 0.001).
        at_least: Rounds before which no plateau is reached, ≥ 0 (default: 0).
        at_most: The plateau counts as reached after this many rounds, ≥ 1 and ≥ `at_least`
            (default: None, no bound).
    Example:
        >>> rule = Plateau(window=2)
        >>> is_level(rule, [4.0, 3.0, 2.0, 1.0]), is_level(rule, [1.0, 1.1, 1.0, 1.1])
        (False, True)
    """

    metric: str = "train/loss"
    window: int = 10
    errors: float = 1.0
    tolerance: float = 1e-3
    at_least: int = 0
    at_most: int | None = None


def check_plateau(rule: Plateau) -> None:
    """Refuse settings that are out of range."""
    check_type("rule", rule, Plateau, "fedpa.Plateau()")
    check_type("metric", rule.metric, str, "'train/loss'")
    check_integer("window", rule.window, 2)
    check_number("errors", rule.errors)
    check_number("tolerance", rule.tolerance)
    check_integer("at_least", rule.at_least, 0)
    if rule.at_most is not None:
        check_integer("at_most", rule.at_most, 1)
        if rule.at_most < rule.at_least:
            raise refuse("at_most", rule.at_most, f"must not be below at_least = {rule.at_least}")


def is_level(rule: Plateau, values: Sequence[float]) -> bool:
    """Whether the last value is level: 2w values, of which lower ones are better."""
    w = rule.window
    before, after = math.fsum(values[:w]) / w, math.fsum(values[w:]) / w
    steps = (later - value for value, later in itertools.pairwise(values))
    variance = math.fsum(step * step for step in steps) / (2 * (2 * w - 1))
    noise = rule.errors * math.sqrt(2 * variance / w)
    return before - after <= max(noise, rule.tolerance * abs(before))
