"""Panels as plotly's figures, plain dictionaries: the page's script draws them.

Colours are numbers here, places in the palette: the script knows whether the page is light or dark.
Every trace says in `meta` whose it is and what, so that a method can be hidden in all charts.
"""

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedpa.experiments.report.panels import Panel, Series
from fedpa.experiments.report.summary import Curve

DASHES = ("solid", "dash", "dashdot", "dot", "longdash", "longdashdot", "5px 2px 1px 2px")
"""Told apart without colour, too, like figures' line styles."""
DARK = ("#4C9BE8", "#F07F3C", "#2FBF92", "#E39CC3", "#F2B632", "#8AD0F7", "#F2F2F2")
"""The palette's hues as they are seen on a dark page."""
MOST_MARKS = 4000
"""In one chart: browsers get slow with more, and nobody sees them apart."""
MOST_POINTS = 50_000
"""Of all lines of a page, which is to stay small enough for a letter."""
LEAST_POINTS = 50
"""Of a line, however many there are."""


def charts(
    panels: Sequence[Panel], methods: Sequence[str], least: int = LEAST_POINTS
) -> list[dict[str, Any]]:
    """A figure per panel: its name, data and layout."""
    most = points_shown(panels, least)
    return [_chart(panel, methods, most) for panel in panels]


def points_shown(panels: Sequence[Panel], least: int = LEAST_POINTS) -> int:
    """How many points a line has at most: its share of all, but at least `LEAST_POINTS`."""
    lines = sum(1 + 2 * (s.low is not None) + len(s.rest) for p in panels for s in p.series)
    return max(MOST_POINTS // max(lines, 1), least)


def dash(index: int) -> str:
    """Of the method at this place; where colours repeat, dashes differ."""
    return DASHES[(index + index // len(DASHES)) % len(DASHES)]


def marks_shown(panel: Panel) -> int:
    """Every how many-th evaluation has a mark."""
    number = sum(len(m.points.rounds) for s in panel.series for m in s.marks)
    return max(math.ceil(number / MOST_MARKS), 1)


def _chart(panel: Panel, methods: Sequence[str], most: int) -> dict[str, Any]:
    every = marks_shown(panel)
    places = {method: index for index, method in enumerate(methods)}
    data = [
        trace
        for series in panel.series
        for trace in _traces(series, places[series.method], most, every)
    ]
    layout = {
        "xaxis": {"title": {"text": "round"}},
        "yaxis": {"title": {"text": html.escape(panel.y)}},
        "shapes": [
            *(_horizontal(target) for target in panel.targets),
            *(_vertical(switch) for switch in panel.switches),
        ],
        "annotations": [
            *(_target(target, place) for place, target in enumerate(panel.targets)),
            *(_switch(t, place, _last(panel)) for place, t in enumerate(panel.switches)),
        ],
    }
    return {"name": panel.name, "data": data, "layout": layout}


def _traces(series: Series, index: int, most: int, every: int) -> list[dict[str, Any]]:
    """Band first, so that it lies behind."""
    traces = []
    if series.low is not None and series.high is not None:
        low, high = _thinned(series.low, most), _thinned(series.high, most)
        # There along the top and back along the bottom: one trace, which is shown or not.
        around = Curve(
            np.concatenate([high.rounds, low.rounds[::-1]]),
            np.concatenate([high.values, low.values[::-1]]),
        )
        if np.all(np.isfinite(around.values)):
            traces.append(_trace(series, index, "band", around))
    for marks in series.marks:
        points = Curve(marks.points.rounds[::every], marks.points.values[::every])
        traces.append(_trace(series, index, "marks", points, marks.seed))
    rests = [
        _trace(series, index, "rest", _thinned(rest.points, most), rest.seed)
        for rest in series.rest
    ]
    return [*traces, *rests, _trace(series, index, "line", _thinned(series.line, most))]


def _trace(
    series: Series, index: int, role: str, points: Curve, seed: str | None = None
) -> dict[str, Any]:
    whose = html.escape(series.method) + ("" if seed is None else f", seed {html.escape(seed)}")
    return {
        "type": "scatter",
        "name": whose,
        "x": points.rounds.tolist(),
        "y": [_short(value) for value in points.values],
        "meta": {"method": index, "role": role},
    }


def _thinned(c: Curve, most: int) -> Curve:
    """At most about `most` points, the last among them."""
    every = max(math.ceil(len(c.rounds) / most), 1)
    kept = np.arange(len(c.rounds))[::-1][::every][::-1]
    return Curve(c.rounds[kept], c.values[kept])


def _short(value: float) -> float | None:
    """As many digits as one can see; JSON has no NaN."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _horizontal(y: float) -> dict[str, Any]:
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "name": "target"}


def _vertical(x: int) -> dict[str, Any]:
    return {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": x, "x1": x, "name": "switch"}


def _target(y: float, place: int) -> dict[str, Any]:
    """Left and right in turn: targets may lie closer together than their names are high."""
    side = {"x": 0, "xanchor": "left"} if place % 2 == 0 else {"x": 1, "xanchor": "right"}
    where = {"xref": "paper", "y": y, "yanchor": "bottom"}
    return side | where | {"text": f"target {y:g}", "showarrow": False}


def _switch(x: int, place: int, last: int) -> dict[str, Any]:
    """One above the other, where methods begin in different rounds; on the side that has room."""
    where = {"yref": "paper", "y": 0.01 + 0.07 * place, "yanchor": "bottom", "x": x}
    side = ("left", 3) if x < 0.6 * last else ("right", -3)
    text = {"text": "sampling begins", "xanchor": side[0], "xshift": side[1], "showarrow": False}
    return where | text


def _last(panel: Panel) -> int:
    ends = [m.points.rounds for s in panel.series for m in s.marks]
    return max((int(rounds[-1]) for rounds in ends if len(rounds)), default=0)
