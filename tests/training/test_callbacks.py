"""When runs end: the rules one by one, on made-up metrics."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpa import Best, FedpaError, early_stopping, stop_at
from fedpa.experiments.report.curves import Curve, find_rounds_to
from fedpa.metrics.metric import lower_is_better
from fedpa.training import Event, Stop, max_minutes
from fedpa.training.callbacks import remember_best

METRIC = "eval/accuracy"
curves = st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30)
"""A value for each round; None where it was not evaluated."""


def followed(callback, values, metric=METRIC):
    """(the round it stops in or None, what it remembers at the end)."""
    memory = callback.init
    for t, value in enumerate(values, start=1):
        record = {"round": t} | ({} if value is None else {metric: value})
        memory, answer = callback.update(memory, Event(t, 99, None, None, record))
        if isinstance(answer, Stop):
            return t, memory
    return None, memory


@given(curves, st.floats(0, 1), st.integers(1, 12))
def test_a_target_is_reached_when_tables_say_so(values, target, window):
    """The same definition of rounds-to-target as in tables, for any window, from its end on."""
    rounds = np.array([t for t, value in enumerate(values, 1) if value is not None], int)
    curve = Curve(rounds, np.array([value for value in values if value is not None], float))
    smooth = [
        (int(t), np.mean(curve.values[(rounds > t - window) & (rounds <= t)])) for t in rounds
    ]
    # Sums in another order: a mean that is the target to the last digit may go either way.
    if any(abs(mean - target) < 1e-12 for _, mean in smooth):
        return
    reached = [t for t, mean in smooth if mean >= target]
    expected = next((t for t in reached if t >= window), None)
    assert followed(stop_at(METRIC, target, window), values)[0] == expected
    if window == 10:
        assert find_rounds_to(curve, target) == next(iter(reached), None)


@given(curves, st.integers(1, 5), st.floats(0, 0.5))
def test_patience_is_what_it_says(values, patience, least):
    """It ends with `patience` evaluations in a row none of which beat the best before them."""
    end, memory = followed(early_stopping(METRIC, patience, least), values)
    seen = [(t, v) for t, v in enumerate(values, 1) if v is not None and (end is None or t <= end)]
    best, waited = None, 0
    for t, value in seen:
        if best is None or value - best > least:
            best, waited = value, 0
        else:
            waited += 1
        assert (waited == patience) == (t == end)
    assert memory["value"] == best
    assert memory["waited"] == waited


@given(curves)
def test_the_best_is_the_first_maximum(values):
    _, memory = followed(remember_best(Best(METRIC)), values)
    known = [value for value in values if value is not None]
    if known:
        assert memory["value"] == max(known)
        assert memory["round"] == values.index(max(known)) + 1
    _, memory = followed(remember_best(Best("eval/loss")), values, "eval/loss")
    assert memory["value"] == (min(known) if known else None)


def test_nan_is_never_better():
    nan = float("nan")
    assert followed(early_stopping(METRIC, 2), [0.5, nan, nan])[0] == 3
    assert followed(early_stopping(METRIC, 2), [nan, nan])[0] == 2
    assert followed(remember_best(Best(METRIC)), [nan, 0.1, nan])[1]["round"] == 2
    assert followed(stop_at(METRIC, 0.1, 1), [nan, 0.05])[0] is None


def test_directions():
    assert lower_is_better("eval/loss")
    assert lower_is_better("valid/perplexity")
    assert not lower_is_better("eval/accuracy_p10")
    for name in ("eval/mse", "eval/RMSE", "valid/test_error", "eval/nll"):
        assert lower_is_better(name)
    assert followed(stop_at("eval/loss", 0.3, 1), [0.5, 0.29], "eval/loss")[0] == 2
    assert followed(stop_at(METRIC, 0.3, 1, lower=True), [0.5, 0.29])[0] == 2


def test_a_metric_that_never_comes_is_refused():
    for callback in (early_stopping("eval/auc", 2), stop_at("accuracy", 0.5)):
        with pytest.raises(FedpaError, match=r"there is no metric .*eval/accuracy"):
            followed(callback, [0.5])


def test_minutes_are_those_of_a_clock_that_does_not_jump():
    now = [0.0]
    callback = max_minutes(2, clock=lambda: now[0])
    event = Event(3, 9, None, None, {})
    now[0] = 119.0
    assert callback(event) is None
    now[0] = 120.0
    assert callback(event) == Stop("2 minutes are over", finished=False)


@pytest.mark.parametrize(
    "build",
    [
        lambda: early_stopping(METRIC, 0),
        lambda: early_stopping(METRIC, 2, -0.1),
        lambda: stop_at(METRIC, float("nan")),
        lambda: stop_at(METRIC, 0.5, 0),
        lambda: max_minutes(0),
    ],
)
def test_what_makes_no_sense_is_refused(build):
    with pytest.raises(FedpaError, match=r" = .*: must be"):
        build()
